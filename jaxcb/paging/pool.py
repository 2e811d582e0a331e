"""PagePool: an O(1) allocator of KV pages with reference counts and a least-recently-used order.

The free list is an intrusive doubly linked list over page numbers, as in vLLM's block pool. It holds every page that
nobody refers to. Its head is what is given out next; a page whose content may be reused goes to the tail, a page
with nothing worth keeping to the head. So reusable pages live as long as memory allows, oldest out first.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

TRASH_PAGE = 0
"""Padding tokens write here and nobody reads it. It is never allocated."""


class PagePool:
    """Pages 1..num_pages; page 0 is the trash page.

    ``on_evict(page)`` is called when a page whose content was kept for reuse is given out for something else.
    """

    def __init__(self, num_pages: int, on_evict: Callable[[int], None] | None = None):
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {num_pages}")
        self.num_pages = num_pages
        self._on_evict = on_evict
        # Arrays of C integers: the garbage collector need not walk them.
        self._refcount = array("i", bytes(4 * (num_pages + 1)))
        self._reusable = bytearray(num_pages + 1)
        # The trash page is the sentinel of the ring: next[0] is the head, prev[0] the tail.
        self._next = array("i", (*range(1, num_pages + 1), 0))
        self._prev = array("i", (num_pages, *range(num_pages)))
        self.num_free = num_pages
        """Pages that nobody refers to, those kept for reuse included."""
        self.num_reusable_free = 0
        """The part of ``num_free`` whose content is kept for reuse."""

    @property
    def num_used(self) -> int:
        """Pages that somebody refers to."""
        return self.num_pages - self.num_free

    def refcount(self, page: int) -> int:
        return self._refcount[page]

    def is_reusable(self, page: int) -> bool:
        return bool(self._reusable[page])

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` pages, each with one reference.

        Raises:
            RuntimeError: fewer than ``count`` pages are free. Callers check ``num_free`` first.
        """
        if count > self.num_free:
            raise RuntimeError(f"asked for {count} pages, {self.num_free} of {self.num_pages} are free")
        return [self.allocate_one() for _ in range(count)]

    def allocate_one(self) -> int:
        """Take the page at the head. Callers check ``num_free`` first."""
        links = self._next
        page = links[TRASH_PAGE]
        links[TRASH_PAGE] = after = links[page]
        self._prev[after] = TRASH_PAGE
        self._refcount[page] = 1
        self.num_free -= 1
        if self._reusable[page]:
            self._reusable[page] = 0
            self.num_reusable_free -= 1
            if self._on_evict is not None:
                self._on_evict(page)
        return page

    def retain(self, page: int) -> None:
        """Add a reference to a page that is in use or whose content is kept for reuse."""
        if self._refcount[page] == 0:
            if not self._reusable[page]:
                raise RuntimeError(f"page {page} is free and holds nothing: it can't be retained")
            self._unlink(page)
        self._refcount[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference of each page. Pass a sequence's pages last first: leaves are then evicted before roots."""
        for page in pages:
            count = self._refcount[page] - 1
            if count < 0:
                raise RuntimeError(f"page {page} is released more often than it was taken")
            self._refcount[page] = count
            if count == 0:
                self._link(page)

    def keep_for_reuse(self, page: int) -> None:
        """Mark a page in use: when it is released its content stays until memory is needed."""
        if self._refcount[page] == 0:
            raise RuntimeError(f"page {page} is free: only a page in use can be kept for reuse")
        self._reusable[page] = 1

    def forget(self, page: int) -> None:
        """The content of a page is worth nothing any more. A free one is the next to be given out."""
        if self._reusable[page]:
            free = self._refcount[page] == 0
            if free:
                self._unlink(page)
            self._reusable[page] = 0
            if free:
                self._link(page)

    def check(self) -> None:
        """Raise AssertionError unless every page is either referred to or exactly once in the free list."""
        seen = set()
        page, before = self._next[TRASH_PAGE], TRASH_PAGE
        while page != TRASH_PAGE:
            assert page not in seen, f"page {page} is twice in the free list"
            assert self._refcount[page] == 0, f"page {page} is free and has {self._refcount[page]} references"
            assert self._prev[page] == before, f"free list is broken at page {page}"
            seen.add(page)
            page, before = self._next[page], page
        assert len(seen) == self.num_free, f"free list holds {len(seen)} pages, counted {self.num_free}"
        reusable = sum(self._reusable[page] for page in seen)
        assert reusable == self.num_reusable_free, (
            f"{reusable} free pages are reusable, counted {self.num_reusable_free}"
        )
        for page in range(1, self.num_pages + 1):
            assert (self._refcount[page] == 0) == (page in seen), f"page {page} is neither free nor used"
        assert self._refcount[TRASH_PAGE] == 0, "the trash page was given out"

    def _unlink(self, page: int) -> None:
        before, after = self._prev[page], self._next[page]
        self._next[before], self._prev[after] = after, before
        self.num_free -= 1
        self.num_reusable_free -= self._reusable[page]

    def _link(self, page: int) -> None:
        before = self._prev[TRASH_PAGE] if self._reusable[page] else TRASH_PAGE
        after = self._next[before]
        self._next[before] = self._prev[after] = page
        self._prev[page], self._next[page] = before, after
        self.num_free += 1
        self.num_reusable_free += self._reusable[page]
