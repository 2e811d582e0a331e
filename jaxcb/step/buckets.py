"""Buckets: the few shapes (T tokens, S sequences) that are compiled, and which of them a step runs in."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """``decode_only``: T == S and token i belongs to row i. Otherwise S is the largest number of sequences."""

    num_tokens: int
    num_seqs: int
    decode_only: bool

    def __str__(self) -> str:
        return f"{'decode' if self.decode_only else 'mixed'} {self.num_tokens}"


class Buckets:
    """The compiled shapes of an engine. The largest mixed one equals the token budget.

    Arguments:
        max_num_seqs: sequences in one step.
        max_num_batched_tokens: the token budget.
        decode_sizes: rows of the decode buckets below ``max_num_seqs``, which is always one.
        mixed_sizes: tokens of the mixed buckets below the budget, which is always one.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        decode_sizes: tuple[int, ...],
        mixed_sizes: tuple[int, ...],
    ):
        self._decode = _sizes(decode_sizes, max_num_seqs)
        self._mixed = _sizes(mixed_sizes, max_num_batched_tokens)
        self._decode_buckets = [Bucket(size, size, True) for size in self._decode]
        self._mixed_buckets = [Bucket(size, max_num_seqs, False) for size in self._mixed]

    def __iter__(self) -> Iterator[Bucket]:
        yield from self._decode_buckets
        yield from self._mixed_buckets

    def __len__(self) -> int:
        return len(self._decode) + len(self._mixed)

    def choose(self, num_tokens: int, decode_only: bool) -> Bucket:
        """The smallest bucket that holds ``num_tokens``; a decode-only step has as many rows as tokens."""
        if decode_only:
            return self._decode_buckets[bisect_left(self._decode, num_tokens)]
        return self._mixed_buckets[bisect_left(self._mixed, num_tokens)]


def _sizes(sizes: tuple[int, ...], largest: int) -> list[int]:
    return [*sorted(size for size in sizes if size < largest), largest]
