"""PrefixCache: finds the KV pages of a prompt's beginning that were computed before.

A node stands for one full page and is known by (parent node, the page's token ids), so a lookup compares real tokens
and two different prefixes can never be taken for each other. This is SGLang's prefix tree cut at page borders; the
eviction order is the PagePool's.

Example, page_size 2: prompts [5, 6, 7, 8, 9] and [5, 6, 7, 4] share one node:

    ROOT --(5, 6)--> page 3 --(7, 8)--> page 9        the 9 and the (7, 4) that is still being computed have none
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxcb.paging.pool import PagePool

ROOT = 0
"""The node of the empty prefix."""


class PrefixCache:
    """Owns the PagePool of an engine, since evicting a page and forgetting its node are one act."""

    def __init__(self, num_pages: int, page_size: int, *, enabled: bool = True):
        self.page_size = page_size
        self.enabled = enabled
        self.pool = PagePool(num_pages, on_evict=self._forget)
        self._page_of: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # key -> (page, node)
        self._key_of: dict[int, tuple[int, tuple[int, ...]]] = {}  # page -> key
        self._next_node = ROOT + 1

    def match(self, token_ids: Sequence[int], max_tokens: int) -> tuple[list[int], int]:
        """Longest run of cached full pages that ``token_ids`` begins with, at most ``max_tokens`` tokens.

        Returns:
            The pages, first to last (no reference is taken), and the node of the last one (ROOT if none).
        """
        pages: list[int] = []
        node = ROOT
        if self.enabled:
            for start in range(0, max_tokens - self.page_size + 1, self.page_size):
                found = self._page_of.get((node, tuple(token_ids[start : start + self.page_size])))
                if found is None:
                    break
                page, node = found
                pages.append(page)
        return pages, node

    def register(self, parent: int, token_ids: tuple[int, ...], page: int) -> int:
        """Make a full page, in use and completely computed, known as the continuation of ``parent``.

        If an equal page is known already, that one stays and ``page`` is not kept. Returns the node to go on from.
        """
        if not self.enabled:
            return ROOT
        key = (parent, token_ids)
        if (known := self._page_of.get(key)) is not None:
            return known[1]
        node, self._next_node = self._next_node, self._next_node + 1
        self._page_of[key] = (page, node)
        self._key_of[page] = key
        self.pool.keep_for_reuse(page)
        return node

    def check(self) -> None:
        """Raise AssertionError unless the tree, the pool and the marks agree."""
        self.pool.check()
        for page, key in self._key_of.items():
            assert self._page_of[key][0] == page, f"page {page} is known under a key of another page"
            assert self.pool.is_reusable(page), f"page {page} has a node and is not kept"
        assert len(self._page_of) == len(self._key_of), "a node has no page"

    def _forget(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]
