"""PrefixCache: finds the KV pages of a beginning that was computed before, on the device or in host memory.

A node stands for one full page and is known by (parent node, the page's token ids): a chain of hashes as in vLLM, but a
lookup compares the parent and the tokens themselves, so two prefixes can never be taken for each other, whatever their
hashes. The first parent holds what else the KV depends on and a request's salt: other salts share nothing.

Example, page_size 2: prompts [5, 6, 7, 8, 9] and [5, 6, 7, 4] share one node:

    root(salt) --(5, 6)--> page 3 --(7, 8)--> page 9        the 9 and the (7, 4) that is being computed have none

Eviction is least recently used, leaves first. Both follow from the order in which pages are released, if whoever uses a
node also holds the pages of all its ancestors; that is why :meth:`register` returns the page to hold besides one's own.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from jaxcb.paging.host import HostPool
from jaxcb.paging.moves import PageMoves
from jaxcb.paging.pool import PagePool

Node = Hashable
Key = tuple[Node, bytes]
TOKEN_BYTES = struct.calcsize("i")


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as the bytes that keys are made of."""
    return struct.pack(f"{len(token_ids)}i", *token_ids)


class Match(NamedTuple):
    """Pages of a known beginning, first to last. A negative number is a page in host memory."""

    pages: list[int]
    node: Node
    """The last page's node, to go on from; the root if there are no pages."""


class PrefixCache:
    """Owns the pools of an engine, since giving a page to someone else and forgetting its node are one act."""

    def __init__(self, num_pages: int, page_size: int, *, enabled: bool = True, num_host_pages: int = 0):
        self.page_size = page_size
        self.enabled = enabled
        self.pool = PagePool(num_pages, on_evict=self._evict)
        self.host = HostPool(num_host_pages, on_evict=self._forget_host)
        self.moves = PageMoves()
        """Moves that the next step has to make."""
        self._page_of: dict[Key, tuple[int, int]] = {}  # key -> (page, negative in host memory; node)
        self._key_of: dict[int, Key] = {}  # page, negative in host memory -> key
        self._next_node = 1
        self._epoch = 0
        self.version = 0
        """Counts changes of what is known: as long as it stays the same, so does every match."""
        self.num_brought_back = 0
        """Pages that a hit moved from host memory to the device, since the start."""
        self.pinned_pages: list[int] = []
        """Every reference that pins hold, leaves first."""

    def root(self, salt: Hashable = "") -> Node:
        """The node of the empty prefix for a salt."""
        return self._epoch, salt

    def match(self, root: Node, tokens: bytes, max_tokens: int, *, on_device: bool = False) -> Match:
        """Longest run of known full pages that ``tokens`` begin with, at most ``max_tokens`` tokens, and with
        ``on_device`` only up to the first one in host memory. Takes nothing."""
        pages: list[int] = []
        node = root
        if self.enabled:
            page_bytes = self.page_size * TOKEN_BYTES
            for start in range(0, (max_tokens // self.page_size) * page_bytes, page_bytes):
                found = self._page_of.get((node, tokens[start : start + page_bytes]))
                if found is None or (on_device and found[0] < 0):
                    break
                page, node = found
                pages.append(page)
        return Match(pages, node)

    def num_to_take(self, pages: Sequence[int]) -> int:
        """Free device pages that :meth:`take` uses up: one in host memory needs one, a free one is no more free."""
        return sum(page < 0 or self.pool.refcount(page) == 0 for page in pages)

    def take(self, pages: Sequence[int]) -> list[int]:
        """Refer to the pages of a match. Those in host memory move back to the device.

        Returns:
            Device pages. The caller has checked that :meth:`num_to_take` pages are free.
        """
        for page in pages:  # all of them first: what follows may evict
            if page < 0:
                self.host.retain(-page)
            else:
                self.pool.retain(page)
        return [self._bring_back(-page) if page < 0 else page for page in pages]

    def register(self, parent: Node, tokens: bytes, page: int) -> tuple[Node, int]:
        """Make a full page, in use and completely computed, known as the continuation of ``parent``.

        Returns:
            The node to go on from, and the page that stands for it. If that is another page than ``page``, equal
            tokens were known before; a reference to it was taken, to be released just after ``page`` is.
        """
        key = (parent, tokens)
        known = self._page_of.get(key)
        if known is not None:
            other, node = known
            if other > 0:
                if other != page:
                    self.pool.retain(other)
                return node, other
            self._forget_host(-other)  # it was computed again: the copy in host memory isn't needed
            self.host.retain(-other)
            self.host.free((-other,))
        else:
            node, self._next_node = self._next_node, self._next_node + 1
        self.version += 1
        self._page_of[key] = (page, node)
        self._key_of[page] = key
        self.pool.keep_for_reuse(page)
        return node, page

    def pin(self, root: Node, tokens: bytes) -> int:
        """Keep the known pages of a beginning from eviction until :meth:`unpin`; returns how many.

        The caller has checked that :meth:`num_to_take` pages are free.
        """
        pages = self.take(self.match(root, tokens, len(tokens) // TOKEN_BYTES).pages)
        self.pinned_pages[:0] = reversed(pages)
        return len(pages)

    def unpin(self) -> None:
        """Undo all pins."""
        self.pool.release(self.pinned_pages)
        self.pinned_pages = []

    def reset(self) -> None:
        """Forget every prefix (new weights, say). Running sequences go on; what they computed so far isn't shared."""
        self._epoch += 1
        self.version += 1
        self.unpin()
        for page in self._key_of:
            if page > 0:
                self.pool.forget(page)
            else:
                self.host.retain(-page)
                self.host.free((-page,))
        self._page_of.clear()
        self._key_of.clear()

    def take_moves(self) -> PageMoves | None:
        """The moves of the step that is being handed over, if there are any."""
        self.host.settle()
        if not self.moves:
            return None
        moves, self.moves = self.moves, PageMoves()
        moves.out = list({host_page: (page, host_page) for page, host_page in moves.out}.values())  # the last counts
        return moves

    def check(self) -> None:
        """Raise AssertionError unless the nodes, the pools and the marks agree."""
        self.pool.check()
        self.host.check()
        for page, key in self._key_of.items():
            assert self._page_of[key][0] == page, f"page {page} is known under a key of another page"
            pool = self.pool if page > 0 else self.host.pool
            assert pool is not None and pool.is_reusable(abs(page)), f"page {page} has a node and is not kept"
        assert len(self._page_of) == len(self._key_of), "a node has no page"

    def _bring_back(self, host_page: int) -> int:
        self.version += 1
        key = self._key_of.pop(-host_page)
        page = self.pool.allocate_one()
        self._page_of[key] = (page, self._page_of[key][1])
        self._key_of[page] = key
        self.pool.keep_for_reuse(page)
        self.moves.into.append((host_page, page))
        self.num_brought_back += 1
        self.host.free((host_page,))
        return page

    def _evict(self, page: int) -> None:
        """A page of the device is given to someone else: its content moves to host memory if there is room."""
        self.version += 1
        key = self._key_of.pop(page)
        if self.host.num_free:
            (host_page,) = self.host.allocate(1)
            self._page_of[key] = (-host_page, self._page_of[key][1])
            self._key_of[-host_page] = key
            self.host.keep(host_page)
            self.moves.out.append((page, host_page))
        else:
            del self._page_of[key]

    def _forget_host(self, host_page: int) -> None:
        self.version += 1
        del self._page_of[self._key_of.pop(-host_page)]
