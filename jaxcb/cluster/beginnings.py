"""Beginnings: which engines were sent which beginnings of prompts, so that a request finds its pages again.

What an engine's cache really holds is known to its own thread alone, and changes with every step. This table remembers
what was sent: a page that was evicted since is computed again, which costs time and never changes an answer. (SGLang's
cache-aware router, Zheng et al. 2024, keeps a tree of characters; blocks of tokens under a chain of hashes need no more
than a lookup each, as in vLLM's prefix cache.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from jaxcb.paging import pack_tokens
from jaxcb.paging.prefix import TOKEN_BYTES
from jaxcb.request import Request

BLOCK_TOKENS = 64
MAX_BLOCKS = 256
"""Blocks of a prompt that are looked at; beginnings that part later count as equal."""


class Beginnings:
    """Not thread-safe. ``capacity``: blocks that are remembered; the least recently sent go first."""

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._sent: OrderedDict[int, int] = OrderedDict()
        """Block, by the hash of everything up to its end -> a bit for each engine that was sent it."""

    def tokens(self, blocks: Sequence[int], num_engines: int) -> list[int]:
        """How many of the first tokens each engine was sent before."""
        known = [0] * num_engines
        engines = (1 << num_engines) - 1
        for count, block in enumerate(blocks, 1):
            engines &= self._sent.get(block, 0)
            if not engines:
                break
            for index in range(num_engines):
                if engines >> index & 1:
                    known[index] = count * BLOCK_TOKENS
        return known

    def sent(self, blocks: Sequence[int], engine: int) -> None:
        """An engine computes these."""
        for block in blocks:
            self._sent[block] = self._sent.get(block, 0) | 1 << engine
            self._sent.move_to_end(block)
        while len(self._sent) > self._capacity:
            self._sent.popitem(last=False)

    def forget(self) -> None:
        """The caches were reset."""
        self._sent.clear()


def blocks_of(request: Request) -> list[int]:
    """The full blocks of a prompt, each as the hash of its tokens, of all before it and of the salt."""
    count = min(len(request.prompt_token_ids) // BLOCK_TOKENS, MAX_BLOCKS)
    packed = pack_tokens(request.prompt_token_ids[: count * BLOCK_TOKENS])
    blocks, so_far = [], hash(request.cache_salt)
    for start in range(0, len(packed), TOKEN_BYTES * BLOCK_TOKENS):
        so_far = hash((so_far, packed[start : start + TOKEN_BYTES * BLOCK_TOKENS]))
        blocks.append(so_far)
    return blocks
