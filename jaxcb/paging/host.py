"""HostPool: numbers of KV pages in host memory.

They hold what sequences left when they were swapped out, for as long as those wait, and, in what room is left, prefix
pages that the device gave up: the second tier of the prefix cache, least recently used out first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from jaxcb.paging.pool import PagePool


class HostPool:
    """Host pages 1..num_pages. ``on_evict(page)`` is called when a page of the second tier is given out.

    A page that was freed is given out again only after :meth:`settle`: a step that was planned but not handed over yet
    may still have to read it.
    """

    def __init__(self, num_pages: int, on_evict: Callable[[int], None]):
        self.num_pages = num_pages
        self.pool = PagePool(num_pages, on_evict) if num_pages else None
        self._freed: list[int] = []

    @property
    def num_free(self) -> int:
        """Pages that can be taken now; those of the second tier are among them."""
        return self.pool.num_free if self.pool else 0

    @property
    def num_used(self) -> int:
        """Pages that hold swapped sequences, or were freed and are not settled."""
        return self.pool.num_used if self.pool else 0

    @property
    def num_freed(self) -> int:
        """Pages that were freed and are not settled."""
        return len(self._freed)

    @property
    def num_cached(self) -> int:
        """Pages of the second tier."""
        return self.pool.num_reusable_free if self.pool else 0

    def allocate(self, count: int) -> list[int]:
        """Take pages. Callers check ``num_free`` first."""
        return self.pool.allocate(count) if self.pool else []

    def keep(self, page: int) -> None:
        """A taken page joins the second tier."""
        assert self.pool is not None
        self.pool.keep_for_reuse(page)
        self.pool.release((page,))

    def retain(self, page: int) -> None:
        """A page of the second tier is about to be read: it can't be evicted until it is freed."""
        assert self.pool is not None
        self.pool.retain(page)

    def free(self, pages: Iterable[int]) -> None:
        """Taken or retained pages are of no use any more."""
        self._freed += pages

    def settle(self) -> None:
        """Whatever was freed so far may be overwritten from now on."""
        if self._freed:
            assert self.pool is not None
            for page in self._freed:
                self.pool.forget(page)
            self.pool.release(self._freed)
            self._freed.clear()

    def check(self) -> None:
        """Raise AssertionError unless the numbers agree."""
        if self.pool:
            self.pool.check()
            assert all(self.pool.refcount(page) == 1 for page in self._freed), "a host page was freed twice"
