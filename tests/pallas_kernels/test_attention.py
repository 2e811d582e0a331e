"""Ragged paged attention of every backend against the float64 reference."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pallas_kernels.batches import Batch, ragged_batch, relative_error

BACKENDS = ["xla", "triton"]
TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-2}
MIXED = [(7, 7), (1, 33), (40, 55), (1, 1), (16, 64)]
"""A prompt, a decode, a chunk that ends a prompt, a decode of the first token, a chunk on page boundaries."""
DECODES = [(1, 1), (1, 16), (1, 17), (1, 15), (1, 130), (1, 300)]


def assert_matches_reference(batch: Batch, backend: str, **options: float) -> None:
    got, want = batch.attend(backend, **options), batch.expected(**options)
    assert got.dtype == batch.q.dtype
    assert relative_error(got, want) < TOLERANCE[str(batch.q.dtype)]
    assert not got[batch.query_starts[-1] :].any(), "padding tokens give 0"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "heads, head_dim, page_size, window, soft_cap",
    [
        ((9, 3), 64, 16, None, None),
        ((9, 3), 64, 16, 20, 30.0),
        ((4, 1), 16, 8, None, 2.0),
        ((8, 8), 16, 64, 20, None),
        ((12, 2), 128, 16, None, None),
        ((6, 2), 80, 8, None, None),
    ],
)
def test_mixed_batch(backend, heads, head_dim, page_size, window, soft_cap):
    batch = ragged_batch(
        MIXED, heads=heads, head_dim=head_dim, page_size=page_size, window=window, num_tokens=80, num_seqs=8
    )
    assert_matches_reference(batch, backend, soft_cap=soft_cap)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "heads, head_dim, page_size, window",
    [((9, 3), 64, 16, None), ((9, 3), 64, 16, 150), ((4, 1), 128, 64, None), ((8, 8), 16, 8, 20)],
)
def test_decodes_alone(backend, heads, head_dim, page_size, window):
    batch = ragged_batch(
        DECODES, heads=heads, head_dim=head_dim, page_size=page_size, window=window, num_seqs=8, decode_only=True
    )
    assert_matches_reference(batch, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_sequence(backend):
    for context in (1, 128, 300):
        batch = ragged_batch([(1, context)], num_seqs=1, decode_only=True, table_width=38, num_pages=40)
        assert_matches_reference(batch, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 100])
def test_chunk_longer_than_a_tile_and_a_block(backend, window):
    batch = ragged_batch([(130, 400), (1, 140), (65, 65)], window=window, num_tokens=200, num_seqs=4)
    assert_matches_reference(batch, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [8, 16])
def test_contexts_on_both_sides_of_page_boundaries(backend, page_size):
    seqs = [(1, page_size + d) for d in (-1, 0, 1)] + [(3, 2 * page_size + d) for d in (0, 1, 2)]
    assert_matches_reference(ragged_batch(seqs, page_size=page_size), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sequences_that_share_pages(backend):
    batch = ragged_batch([(1, 40), (1, 33), (9, 48)], shared_pages=3)
    assert (batch.block_tables[:, :3] == batch.block_tables[0, :3]).all()
    assert_matches_reference(batch, backend)


@pytest.mark.parametrize("backend, kv_dtype", [("xla", "uint16"), ("xla", "bfloat16"), ("triton", "bfloat16")])
def test_bfloat16(backend, kv_dtype):
    batch = ragged_batch(MIXED, dtype="bfloat16", kv_dtype=kv_dtype, num_tokens=80, num_seqs=8)
    assert_matches_reference(batch, backend)


@pytest.mark.parametrize("backend, kv_dtype", [("xla", "uint16"), ("triton", "bfloat16")])
def test_float32_queries_lose_nothing_on_bfloat16_pages(backend, kv_dtype):
    assert_matches_reference(ragged_batch(MIXED, kv_dtype=kv_dtype), backend)


QUANTIZED = [
    ("xla", "int8", "float32"),
    ("xla", "uint8", "bfloat16"),
    ("xla", "float8_e4m3fn", "float32"),
    ("triton", "int8", "float32"),
    ("triton", "float8_e4m3fn", "bfloat16"),
]


@pytest.mark.parametrize("backend, kv_dtype, dtype", QUANTIZED)
def test_quantized_pages(backend, kv_dtype, dtype):
    """Each position has a scale a head; NaN scales where nothing may be read."""
    batch = ragged_batch([(5, 40), (1, 33), (1, 300)], dtype=dtype, kv_dtype=kv_dtype, num_tokens=9, sinks=True)
    assert_matches_reference(batch, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("decode_only, window", [(False, 30), (True, None)])
def test_sinks_take_their_share(backend, decode_only, window):
    seqs = [(1, 700), (1, 3)] if decode_only else [(1, 700), (20, 60)]
    batch = ragged_batch(seqs, sinks=True, decode_only=decode_only, window=window)
    assert relative_error(batch.expected(), dataclasses.replace(batch, sinks=None).expected()) > 0.1
    assert_matches_reference(batch, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scale_is_honoured(backend):
    assert_matches_reference(ragged_batch([(1, 30), (1, 9)], decode_only=True), backend, scale=0.5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_layer_of_the_pool_is_its_own(backend):
    """The layer may be traced, as in a loop over layers. Each reads its own pages: the other layers' are NaN."""
    for layer in (0, 2):
        batch = ragged_batch(MIXED, num_layers=3, layer=layer)
        assert relative_error(batch.attend(backend, traced_layer=True), batch.expected()) < TOLERANCE["float32"]


def test_a_row_does_not_depend_on_its_neighbours():
    """The same decode alone and last of eight others, whose blocks share its iterations."""
    alone = ragged_batch([(1, 300)], num_seqs=1, decode_only=True, seed=1)
    others = ragged_batch([(1, 50 + 37 * i) for i in range(8)], decode_only=True, num_seqs=9, table_width=40, seed=2)
    shift = others.kv_pages.shape[0] // 4
    together = Batch(
        q=np.concatenate([others.q[:8], alone.q]),
        kv_pages=np.concatenate([others.kv_pages, alone.kv_pages]),
        query_starts=np.arange(10, dtype=np.int32),
        context_lens=np.append(others.context_lens[:8], np.int32(300)),
        block_tables=np.concatenate([others.block_tables[:8], np.pad(alone.block_tables + shift, ((0, 0), (0, 2)))]),
        layer=1,
        num_layers=2,
        window=None,
        decode_only=True,
        sinks=None,
    )
    assert relative_error(together.attend("xla")[8:], alone.attend("xla").astype(np.float64)) < 3e-7


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_batch(backend, data):
    """Random batches of one bucket, so that one compilation serves them all."""
    seqs: list[tuple[int, int]] = []
    for later in reversed(range(data.draw(st.integers(1, 5), label="sequences"))):
        left = 48 - later - sum(queries for queries, _ in seqs)
        queries = data.draw(st.just(1) | st.integers(1, left), label="queries")
        seqs.append((queries, queries + data.draw(st.integers(0, 150), label="computed before")))
    batch = ragged_batch(
        seqs,
        seed=data.draw(st.integers(0, 2**32 - 1), label="seed"),
        num_tokens=48,
        num_seqs=6,
        table_width=25,
        num_pages=140,
        window=40,
    )
    assert_matches_reference(batch, backend)


def test_temporaries_do_not_hold_all_positions():
    """32 tables of 8,192 positions: gathering what they could name would take 100 MB."""
    batch = ragged_batch(MIXED, num_seqs=32, table_width=1024, num_tokens=80)
    assert batch.compiled("xla").memory_analysis().temp_size_in_bytes < 4e6
