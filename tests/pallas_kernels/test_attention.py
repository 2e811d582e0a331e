"""Ragged paged attention of every backend against the float64 reference."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.triton.attend import tf32_parts
from tests.pallas_kernels.batches import Batch, ragged_batch, relative_error
from tests.pallas_kernels.pairwise import Row, all_pairs, pairs

BACKENDS = ["xla", "triton"]
TOLERANCE = {"float32": 1e-6, "float16": 1e-2, "bfloat16": 1e-2}
"""Norm of the difference over the norm of the reference."""
MIXED = [(7, 7), (1, 33), (40, 55), (1, 1), (16, 64)]
"""A prompt, a decode, a chunk that ends a prompt, a decode of the first token, a chunk on page boundaries."""
DECODES = [(1, 1), (1, 16), (1, 17), (1, 15), (1, 130), (1, 300)]
BUCKET: dict[str, Any] = {"num_tokens": 200, "num_seqs": 7, "table_width": 90, "num_pages": 320}
"""Batches of one bucket share a compiled function, and compiling is what these tests spend their time on."""


def assert_matches_reference(batch: Batch, backend: str, *, one_path: bool = False, **options: float) -> None:
    got, want = batch.attend(backend, one_path=one_path, **options), batch.expected(**options)
    assert got.dtype == batch.q.dtype
    assert relative_error(got, want) < TOLERANCE[str(batch.q.dtype)]
    assert not got[batch.query_starts[-1] :].any(), "padding tokens give 0"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "seqs, shared_pages",
    [
        (MIXED, 0),
        ([(130, 400), (1, 700), (65, 65)], 0),  # longer than a tile, a block and a split
        ([(1, 8 + d) for d in (-1, 0, 1)] + [(3, 16 + d) for d in (0, 1, 2)], 0),  # around page boundaries
        ([(1, 40), (1, 33), (9, 48)], 3),  # pages in common
        (DECODES, 0),  # no chunk, in a bucket for both
        ([(0, 0), (5, 20), (0, 0), (1, 9)], 0),  # empty rows between others
        ([(200, 200)], 0),  # no padding
    ],
)
def test_ragged_batch(backend, seqs, shared_pages):
    batch = ragged_batch(seqs, shared_pages=shared_pages, **BUCKET)
    assert not shared_pages or (batch.block_tables[:3, :3] == batch.block_tables[0, :3]).all()
    assert_matches_reference(batch, backend)


FEATURES: dict[str, tuple[Any, ...]] = {
    "backend": ("xla", "triton"),
    "heads": ((4, 4), (9, 3), (12, 2), (28, 4), (71, 1)),
    "head_dim": (16, 64, 80, 96, 128, 256),
    "page_size": (16, 32, 64, 128),
    "window": (None, 20, 150),
    "soft_cap": (None, 5.0),
    "sinks": (False, True),
    "scale": (None, 0.3),
    "dtype": ("float32", "bfloat16", "float16"),
    "kv_dtype": ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn"),
    "decode_only": (False, True),
    "one_path": (False, True),
}
TABLE = all_pairs(FEATURES)
"""Every value of a feature beside every value of every other one. The first rows hold six of seven pairs."""
ALWAYS = 16


def words(row: Row) -> str:
    return " ".join(f"{name}={value}".replace(" ", "") for name, value in row.items())


def batch_of(row: Row, *, longest: int = 300) -> Batch:
    """A batch with a row's features: short contexts and long ones, chunks between decodes, a padding row."""
    decode_only = row["decode_only"]
    seqs = [(1, 1), (1, 130), (1, longest), (1, 16)] if decode_only else [(7, 7), (1, longest), (20, 55), (1, 1)]
    names = ("heads", "head_dim", "page_size", "window", "sinks", "dtype", "kv_dtype")
    options = {name: row[name] for name in names}
    num_tokens = 5 if decode_only else 40
    return ragged_batch(seqs, decode_only=decode_only, num_seqs=5, num_tokens=num_tokens, **options)


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=words(row), marks=[pytest.mark.slow] * (i >= ALWAYS)) for i, row in enumerate(TABLE)],
)
def test_features(row):
    options = {name: row[name] for name in ("soft_cap", "scale", "one_path")}
    assert_matches_reference(batch_of(row), row["backend"], **options)


def test_the_table_of_features_holds_every_pair_and_its_beginning_every_value():
    values = list(itertools.chain(*([(name, value) for value in values] for name, values in FEATURES.items())))
    wanted = {pair for pair in itertools.combinations(values, 2) if pair[0][0] != pair[1][0]}
    assert {pair for row in TABLE for pair in pairs(row)} == wanted
    beginning = {pair for row in TABLE[:ALWAYS] for pair in pairs(row)}
    assert len(beginning) > 0.85 * len(wanted)
    assert {value for pair in beginning for value in pair} == set(values)


@pytest.mark.parametrize("kv_dtype", ["uint16", "uint8"])
def test_pages_of_bits(kv_dtype):
    """On CPUs bfloat16 and float8 are stored as integers, and lose nothing to float32 queries."""
    assert_matches_reference(ragged_batch(MIXED, kv_dtype=kv_dtype), "xla")


def test_float32_beside_8_bits_is_two_products_of_tf32():
    """TF32 has 10 bits after the first: it holds 8-bit numbers and the first part, and enough of the second."""
    a = np.random.default_rng(0).standard_normal((64, 64), np.float32)
    high, rest = (np.asarray(part) for part in tf32_parts(a))
    assert not (high.view(np.int32) & 0x1FFF).any() and (high.astype(np.float64) + rest == a).all()
    held = (rest.view(np.int32) & ~0x1FFF).view(np.float32)
    assert relative_error(high.astype(np.float64) + held, a.astype(np.float64)) < 2.0**-21


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_sequence(backend):
    for context in (1, 128, 700):
        batch = ragged_batch([(1, context)], num_seqs=1, decode_only=True, table_width=90, num_pages=100)
        assert_matches_reference(batch, backend)


def test_sinks_take_their_share():
    batch = ragged_batch([(1, 700), (20, 60)], sinks=True)
    assert relative_error(batch.expected(), dataclasses.replace(batch, sinks=None).expected()) > 0.05


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
    for later in reversed(range(data.draw(st.integers(1, 7), label="sequences"))):
        left = 200 - later - sum(queries for queries, _ in seqs)
        queries = data.draw(st.just(1) | st.integers(1, left), label="queries")
        seqs.append((queries, queries + data.draw(st.integers(0, 150), label="computed before")))
    batch = ragged_batch(seqs, seed=data.draw(st.integers(0, 2**32 - 1), label="seed"), **BUCKET)
    assert_matches_reference(batch, backend)


def test_temporaries_do_not_hold_all_positions():
    """32 tables of 8,192 positions: gathering what they could name would take 100 MB."""
    batch = ragged_batch(MIXED, num_seqs=32, table_width=1024, num_tokens=80)
    assert batch.compiled("xla").memory_analysis().temp_size_in_bytes < 4e6
