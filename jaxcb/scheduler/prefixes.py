"""Prefixes: beginnings that are kept, forgotten, found and placed by name, rather than by a request that runs."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from jaxcb.errors import RequestError
from jaxcb.paging import PrefixCache, pack_tokens
from jaxcb.paging.prefix import TOKEN_BYTES
from jaxcb.scheduler.knobs import SchedulerLimits


class Prefixes:
    """Over a scheduler's prefix cache; to be called between two plans."""

    def __init__(self, limits: SchedulerLimits, cache: PrefixCache):
        self._limits, self._cache, self._pool = limits, cache, cache.pool

    def pin(self, token_ids: Seq[int], cache_salt: str = "") -> int:
        """Keep the known full pages of a beginning (a system prompt, say) from eviction.

        Returns:
            Tokens that are pinned.

        Raises:
            RequestError: with so many pages pinned the longest sequence would not fit the pool any more.
        """
        limits, cache = self._limits, self._cache
        root, tokens = cache.root(limits.salt(cache_salt)), pack_tokens(token_ids)
        pages = cache.match(root, tokens, len(token_ids)).pages
        num_pinned = len({*cache.pinned_pages, *pages})
        longest = limits.num_pages(limits.max_model_len)
        num_left = limits.num_kv_pages - num_pinned
        if num_left < longest or cache.num_to_take(pages) > self._pool.num_free:
            raise RequestError(
                f"{num_pinned} pinned pages would leave {num_left} of {limits.num_kv_pages}; the longest sequence "
                f"needs {longest}, and what runs needs {self._pool.num_used}",
                param="token_ids",
            )
        return cache.pin(root, tokens) * limits.page_size

    def unpin(self) -> None:
        """Undo every pin."""
        self._cache.unpin()

    def reset(self) -> None:
        """Forget what is cached, pins included (the weights have changed, say)."""
        self._cache.reset()

    def find(self, token_ids: Seq[int], cache_salt: str = "") -> list[int]:
        """Device pages of the longest known beginning, to be read before the next plan is made."""
        root = self._cache.root(self._limits.salt(cache_salt))
        return self._cache.match(root, pack_tokens(token_ids), len(token_ids), on_device=True).pages

    def place(self, token_ids: Seq[int], cache_salt: str = "") -> list[tuple[int, int]]:
        """Take pages for a beginning whose KV was computed elsewhere (on another engine, say) and make them known. They
        are cached, not pinned.

        Returns:
            (index in the beginning, page) of those whose content the caller brings before the next plan runs: its full
            pages, as many as are free, without those that were known.
        """
        cache, pool = self._cache, self._pool
        if not cache.enabled:
            return []
        size, packed = self._limits.page_size, pack_tokens(token_ids)
        page_bytes = size * TOKEN_BYTES
        root = cache.root(self._limits.salt(cache_salt))
        match = cache.match(root, packed, len(token_ids), on_device=True)
        known, node = cache.take(match.pages), match.node
        new = pool.allocate(min(len(token_ids) // size - len(known), pool.num_free))
        twins = []
        for index, page in enumerate(new, len(known)):
            node, other = cache.register(node, packed[index * page_bytes : (index + 1) * page_bytes], page)
            if other != page:
                twins.append(other)
        placed = [(index, page) for index, page in enumerate(new, len(known)) if pool.is_reusable(page)]
        pool.release((*reversed(twins), *reversed(new), *reversed(known)))
        return placed
