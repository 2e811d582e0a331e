"""With ``one_path`` a token's attention has the same bits in every cut of the batch, and is as right as ever."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pallas_kernels import attention_metadata
from tests.pallas_kernels.batches import Batch, ragged_batch
from tests.pallas_kernels.test_attention import assert_matches_reference

QUERIES, CONTEXTS = (9, 150), (9, 300)
"""A short prompt, and the second half of a long one."""
BUCKETS = {200: 5, 6: 6}
"""Tokens to sequences: two compiled shapes."""
CUTS: Sequence[tuple[int, tuple[tuple[int, int], tuple[int, int]]]] = (
    (200, ((0, 9), (0, 150))),
    (200, ((8, 9), (0, 77))),
    (200, ((3, 5), (77, 150))),
    (6, ((4, 5), (149, 150))),
    (6, ((0, 0), (100, 105))),
    (6, ((0, 0), (105, 106))),
)
"""A bucket, and which query tokens of the two are computed in it."""


def cut(batch: Batch, num_tokens: int, ranges: tuple[tuple[int, int], tuple[int, int]]) -> Batch:
    """Those tokens of the batch, at the same positions and over the same pages; queries of padding are NaN."""
    num_seqs = BUCKETS[num_tokens]
    counts = [end - start for start, end in ranges]
    q = np.full((num_tokens, *batch.q.shape[1:]), np.nan, batch.q.dtype)
    contexts, tables = np.zeros(num_seqs, np.int32), np.zeros((num_seqs, batch.block_tables.shape[1]), np.int32)
    for i, (start, end) in enumerate(ranges):
        first = sum(counts[:i])
        q[first : first + end - start] = batch.q[batch.query_starts[i] + start : batch.query_starts[i] + end]
        contexts[i] = CONTEXTS[i] - QUERIES[i] + end if end > start else 0
    tables[:2] = batch.block_tables
    starts = np.cumsum([0, *counts, *[0] * (num_seqs - 2)]).astype(np.int32)
    return dataclasses.replace(batch, q=q, query_starts=starts, context_lens=contexts, block_tables=tables)


@pytest.mark.parametrize("window", [None, 170])
@pytest.mark.parametrize("backend, dtype", [("xla", "float32"), ("xla", "bfloat16"), ("triton", "float32")])
def test_a_token_has_the_same_bits_in_every_cut(backend: Any, dtype: str, window: int | None) -> None:
    options: dict[str, Any] = {"heads": (6, 2), "head_dim": 64, "dtype": dtype, "window": window, "sinks": True}
    whole = ragged_batch(list(zip(QUERIES, CONTEXTS, strict=True)), **options)
    wanted: dict[tuple[int, int], bytes] = {}
    for num_tokens, ranges in CUTS:
        part = cut(whole, num_tokens, ranges)
        got = part.attend(backend, one_path=True)
        assert not got[part.query_starts[2] :].astype(np.float32).any(), "padding tokens give 0"
        for i, (start, end) in enumerate(ranges):
            for token in range(start, end):
                bits = got[part.query_starts[i] + token - start].tobytes()
                assert wanted.setdefault((i, token), bits) == bits, (num_tokens, ranges, i, token)


@pytest.mark.parametrize("backend", ["xla", "triton"])
@pytest.mark.parametrize("seqs", [[(7, 7), (1, 33), (40, 55), (1, 1), (16, 64)], [(1, 16), (1, 300), (0, 0), (1, 130)]])
def test_one_path_gives_what_the_two_paths_give(backend: Any, seqs: list[tuple[int, int]]) -> None:
    batch = ragged_batch(seqs, num_tokens=80, num_seqs=6)
    assert_matches_reference(batch, backend, one_path=True)


def test_mosaic_refuses_one_path() -> None:
    batch = ragged_batch([(1, 9)], num_seqs=1)
    with pytest.raises(ValueError, match="one_path must be False for backend mosaic"):
        attention_metadata(
            *batch.arrays[2:5],
            num_tokens=1,
            page_size=8,
            num_heads=9,
            num_kv_heads=3,
            head_dim=16,
            one_path=True,
            backend="mosaic",
        )
