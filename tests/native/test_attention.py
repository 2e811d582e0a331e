"""Native attention against float64, and the rule that a token's bits don't depend on how its sequence was cut."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcb.cache import cache_dir
from pallas_kernels import QuantizedPages, attention_metadata, native, ragged_paged_attention, reference, write_kv
from tests.pallas_kernels.batches import Batch, ragged_batch, relative_error

pytestmark = pytest.mark.native
TOLERANCE = 2e-6


def tolerance(kv_dtype: str) -> float:
    """Where the CPU multiplies bfloat16, queries and weights are rounded to it over pages of that."""
    rounded = native.load(cache_dir() / "native").variant == "avx512_bf16" and kv_dtype in ("bfloat16", "uint16")
    return 5e-3 if rounded else TOLERANCE


def tables_of(batch: Batch) -> native.Tables:
    return native.Tables(*map(jnp.asarray, (batch.query_starts, batch.context_lens, batch.block_tables)))


def attend(batch: Batch, **options: Any) -> np.ndarray:
    """The public function on this backend: NaN stands in all that no query may see."""
    return batch.attend("native", **options)


def drawn_batch(draw: Any, *, head_dims: list[int], page_sizes: list[int], kv_dtype: str) -> Batch:
    context = st.integers(1, 300)
    seqs = [(draw(st.integers(1, min(c, 40))), c) for c in draw(st.lists(context, min_size=1, max_size=6))]
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    return ragged_batch(
        seqs,
        seed=draw(st.integers(0, 2**31)),
        heads=(kv_heads * group, kv_heads),
        head_dim=draw(st.sampled_from(head_dims)),
        page_size=draw(st.sampled_from(page_sizes)),
        num_tokens=sum(n for n, _ in seqs) + draw(st.integers(0, 3)),
        num_seqs=len(seqs) + draw(st.integers(0, 2)),
        kv_dtype=kv_dtype,
        window=draw(st.none() | st.integers(1, 150)),
    )


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_any_ragged_batch(data):
    draw = data.draw
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float16", "uint16", "int8"]))
    sizes = {"head_dims": [16, 20, 64, 80, 128, 256], "page_sizes": [8, 16, 64, 128]}
    batch = drawn_batch(draw, **sizes, kv_dtype=dtype)
    soft_cap = draw(st.none() | st.floats(1, 50))
    got = attend(batch, soft_cap=soft_cap)
    assert relative_error(got, batch.expected(soft_cap=soft_cap)) < tolerance(dtype)
    assert not got[batch.query_starts[-1] :].any(), "padding tokens give 0"


def test_one_long_sequence_is_shared_out_to_the_threads():
    for seqs in ([(1, 1500)], [(1, 700), (1, 65)]):
        for window in (None, 400):
            batch = ragged_batch(seqs, head_dim=64, window=window)
            assert relative_error(attend(batch), batch.expected()) < TOLERANCE


def test_sinks_take_their_share_of_the_weight():
    batch = ragged_batch([(1, 40), (5, 90)], heads=(6, 2))
    sinks = np.linspace(-2, 3, 6, dtype=np.float32)
    got = native.attention(
        jnp.asarray(batch.q),
        batch.kv_pages,
        tables_of(batch),
        layer=batch.layer,
        num_layers=batch.num_layers,
        sinks=sinks,
    )
    plain = batch.expected()
    # The weights' sum without the sink, relative to the largest score, is not known here: one position is enough.
    one = ragged_batch([(1, 1)], heads=(6, 2))
    with_sink = native.attention(
        jnp.asarray(one.q), one.kv_pages, tables_of(one), layer=one.layer, num_layers=one.num_layers, sinks=sinks
    )
    keys = one.kv_pages.reshape(-1, one.num_layers, 2, 8, 2, 16)[one.block_tables[0, 0], one.layer, 0, 0]
    scores = np.einsum("hd,hd->h", one.q[0], np.repeat(keys, 3, 0)).astype(np.float64) / 4
    share = np.exp(scores) / (np.exp(scores) + np.exp(sinks))
    np.testing.assert_allclose(with_sink[0], one.expected()[0] * share[:, None], rtol=1e-5)
    assert (np.abs(got) < np.abs(plain)).all()


def projected(seed: int, tokens: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    angles = rng.uniform(0, 6, (tokens, head_dim // 2))
    return {
        "qkv": rng.standard_normal((tokens, (heads + 2 * kv_heads) * head_dim), np.float32),
        "cos": np.cos(angles).astype(np.float32),
        "sin": np.sin(angles).astype(np.float32),
    }


def rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    a, b = np.split(x.astype(np.float64), 2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


@pytest.mark.parametrize("dtype", ["float32", "uint16", "float16"])
@pytest.mark.parametrize("norm", [False, True])
def test_keys_and_values_are_written_and_attended_to(dtype, norm):
    seqs, heads, D = [(7, 7), (1, 33), (40, 55), (1, 1)], (6, 2), 32
    batch = ragged_batch(seqs, heads=heads, head_dim=D, kv_dtype=dtype, num_tokens=52, num_seqs=6)
    rows = projected(5, 52, *heads, D)
    scales = {"q_norm": np.linspace(0.5, 2, D, dtype=np.float32), "k_norm": np.linspace(2, 0.5, D, dtype=np.float32)}
    place = {"layer": batch.layer, "num_layers": batch.num_layers}
    out, pages = native.place_and_attend(
        **rows,
        kv_pages=jnp.asarray(batch.kv_pages),
        tables=tables_of(batch),
        eps=1e-5,
        **place,
        **(scales if norm else {}),
    )
    split = rows["qkv"].reshape(52, -1, D)
    q, k, v = split[:, :6], split[:, 6:8], split[:, 8:]
    if norm:
        q, k = (
            x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5) * scale
            for x, scale in ((q, scales["q_norm"]), (k, scales["k_norm"]))
        )
    q, k = rotated(q, rows["cos"], rows["sin"]), rotated(k, rows["cos"], rows["sin"])
    starts, contexts, used = batch.query_starts, batch.context_lens, 49
    sequence = np.repeat(np.arange(6), np.diff(starts))
    position = contexts[sequence] - starts[sequence + 1] + np.arange(used)
    at = batch.block_tables[sequence, position // 8], position % 8
    wanted_pages = reference.write_kv(batch.kv_pages, k[:used].astype(np.float32), v[:used], *at, **place)
    real = {"uint16": ml_dtypes.bfloat16}.get(dtype, dtype)
    got_pages, wanted_pages = (np.asarray(x).view(real).astype(np.float64) for x in (pages, wanted_pages))
    step = {"float32": 1e-6, "uint16": 2**-8, "float16": 2**-11}[dtype]
    np.testing.assert_allclose(got_pages, wanted_pages, rtol=step, atol=1e-6)
    wanted = reference.ragged_paged_attention(q, np.asarray(pages), starts, contexts, batch.block_tables, **place)
    assert relative_error(np.asarray(out)[:used].reshape(used, 6, D), wanted[:used]) < max(1e-5, tolerance(dtype))
    assert not np.asarray(out)[used:].any()


def as_numbers(pages: Any, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    """int8 keys or values [positions, K, D], and their scales [positions, K], of a table 0, 1, ... in one layer."""
    values, scales = (np.asarray(part)[first::2] for part in pages)
    return values.reshape(-1, *values.shape[2:])[:last], scales.swapaxes(1, 2).reshape(-1, scales.shape[1])[:last]


@settings(deadline=None, max_examples=20)
@given(
    tokens=st.integers(1, 70),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([2, 20, 64]),
    size=st.sampled_from([1e-33, 1e-3, 1.0, 1e4]),
    seed=st.integers(0, 2**31),
)
def test_int8_rows_are_within_half_a_step_and_attended_to_as_they_were_rounded(tokens, kv_heads, head_dim, size, seed):
    heads, page_size = 2 * kv_heads, 8
    rng = np.random.default_rng(seed)
    rows = projected(seed, tokens, heads, kv_heads, head_dim)
    split = rows["qkv"].reshape(tokens, -1, head_dim)
    split[:, heads:] *= rng.uniform(0.1, 10, (tokens, 2 * kv_heads, 1)).astype(np.float32) * np.float32(size)
    split[rng.integers(tokens), heads:] = 0
    count = -(-tokens // page_size)
    pages = QuantizedPages(
        jnp.full((2 * count, page_size, kv_heads, head_dim), 77, jnp.int8),
        jnp.full((2 * count, kv_heads, page_size), jnp.nan),
    )
    batch = np.array([0, tokens], np.int32), np.array([tokens], np.int32), np.arange(count, dtype=np.int32)[None]
    place = {"layer": 0, "num_layers": 1, "scale": 1 / (size * head_dim)}
    out, pages = native.place_and_attend(
        **rows, kv_pages=pages, tables=native.Tables(*map(jnp.asarray, batch)), **place
    )
    q, k = (rotated(x, rows["cos"], rows["sin"]) for x in (split[:, :heads], split[:, heads : heads + kv_heads]))
    for which, wanted in enumerate((k, split[:, heads + kv_heads :].astype(np.float64))):
        values, scales = as_numbers(pages, which, tokens)
        assert np.abs(values).max() <= 127
        if size > 1e-30:
            np.testing.assert_allclose(scales, np.where(wanted.any(-1), np.abs(wanted).max(-1) / 127, 1), rtol=1e-4)
            assert (np.abs(values).max(-1)[wanted.any(-1)] == 127).all()
        error = np.abs(values * scales[..., None].astype(np.float64) - wanted)
        assert (error <= 0.501 * scales[..., None]).all()
    assert np.isnan(np.asarray(pages.scales)[:, :, (tokens - 1) % page_size + 1 :][-2:]).all(), (
        "no other row is written"
    )
    wanted = reference.ragged_paged_attention(q, QuantizedPages(*map(np.asarray, pages)), *batch, **place)
    assert np.linalg.norm(out.reshape(wanted.shape) - wanted) <= 1e-5 * np.linalg.norm(wanted)


def test_int8_rows_are_what_xla_writes():
    rows = projected(9, 40, 6, 2, 16)
    rows |= {"cos": np.ones_like(rows["cos"]), "sin": np.zeros_like(rows["sin"])}  # keys stay as they are
    pages = QuantizedPages(jnp.zeros((12, 8, 2, 16), jnp.int8), jnp.zeros((12, 2, 8)))
    tables = native.Tables(jnp.array([0, 40]), jnp.array([40]), jnp.arange(5, dtype=jnp.int32)[None] + 1)
    _, got = native.place_and_attend(**rows, kv_pages=pages, tables=tables, layer=0, num_layers=1)
    split, position = rows["qkv"].reshape(40, -1, 16), jnp.arange(40, dtype=jnp.int32)
    k, v, at = split[:, 6:8], split[:, 8:], (position // 8 + 1, position % 8)
    wanted = write_kv(pages, k, v, *at, layer=0, num_layers=1, backend="xla")
    np.testing.assert_allclose(got.scales, wanted.scales, rtol=2e-7)  # XLA multiplies by 1 / 127
    different = np.asarray(got.values) != np.asarray(wanted.values)
    assert different.mean() < 1e-3 and np.abs(np.asarray(got.values) - np.asarray(wanted.values, np.int32)).max() <= 1


def test_numbers_that_are_none_come_back_out_of_int8_pages():
    rows = projected(9, 3, 2, 1, 16)
    rows["qkv"][1, -1], rows["qkv"][2, -5] = np.nan, np.inf
    pages = QuantizedPages(jnp.zeros((2, 8, 1, 16), jnp.int8), jnp.zeros((2, 1, 8)))
    tables = native.Tables(jnp.array([0, 3]), jnp.array([3]), jnp.zeros((1, 1), jnp.int32))
    out, _ = native.place_and_attend(**rows, kv_pages=pages, tables=tables, layer=0, num_layers=1)
    assert np.isfinite(out[0]).all() and np.isnan(out[1:]).all()


def needs_pairs(pages: np.ndarray) -> None:
    if native.order_of(pages) != "pairs":
        pytest.skip("pages hold pairs only where the CPU multiplies bfloat16")


def in_pairs(pages: np.ndarray) -> np.ndarray:
    """Pages of rows [F, page_size, K, D], keys and values in turn, as pages of pairs."""
    F, page_size, K, D = pages.shape
    slabs = pages.reshape(F, page_size // 16, 16, K, D).transpose(0, 1, 3, 2, 4)
    keys = slabs.reshape(*slabs.shape[:3], 16, D // 2, 2).swapaxes(3, 4)
    values = slabs.reshape(*slabs.shape[:3], 8, 2, D).swapaxes(4, 5)
    found = np.empty_like(pages)
    found[::2], found[1::2] = keys[::2].reshape(F // 2, page_size, K, D), values[1::2].reshape(F // 2, page_size, K, D)
    return found


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_pages_of_pairs_give_the_bits_of_rows(data):
    draw = data.draw
    dtype = draw(st.sampled_from(["bfloat16", "uint16"]))
    batch = drawn_batch(draw, head_dims=[32, 64, 96, 256], page_sizes=[16, 48, 64], kv_dtype=dtype)
    rows = np.asarray(batch.kv_pages)
    needs_pairs(rows)
    place = {"layer": batch.layer, "num_layers": batch.num_layers, "window": batch.window}
    place["soft_cap"] = draw(st.none() | st.floats(1, 50))
    by_rows, by_pairs = (
        np.asarray(
            native.attention(jnp.asarray(batch.q), jnp.asarray(pages), tables_of(batch), order=order, **place)
        ).view(np.uint32)
        for order, pages in (("rows", rows), ("pairs", in_pairs(rows)))
    )
    np.testing.assert_array_equal(by_rows, by_pairs)
    assert not np.isnan(by_pairs.view(np.float32)).any(), "NaN stands in all that no query may see"


def test_numbers_are_written_in_pairs_as_in_rows():
    seqs, heads, D = [(7, 7), (1, 33), (40, 55), (1, 1)], (6, 2), 64
    batch = ragged_batch(seqs, heads=heads, head_dim=D, page_size=16, kv_dtype="uint16", num_tokens=52, num_seqs=6)
    pages = np.asarray(batch.kv_pages)
    needs_pairs(pages)
    place = {"layer": batch.layer, "num_layers": batch.num_layers, "tables": tables_of(batch)}
    (rows_out, rows), (out, pairs) = (
        native.place_and_attend(**projected(5, 52, *heads, D), kv_pages=jnp.asarray(given), order=order, **place)
        for order, given in (("rows", pages), ("pairs", in_pairs(pages)))
    )
    np.testing.assert_array_equal(in_pairs(np.asarray(rows)), pairs)
    np.testing.assert_array_equal(np.asarray(rows_out).view(np.uint32), np.asarray(out).view(np.uint32))


def test_an_order_that_pages_can_not_have_is_refused():
    batch = ragged_batch([(1, 9)], kv_dtype="float32")
    place = {"layer": batch.layer, "num_layers": batch.num_layers}
    for order, message in (("pairs", 'order must be "rows" for such pages'), ("columns", 'order must be "rows" or')):
        with pytest.raises(ValueError, match=message):
            native.attention(jnp.asarray(batch.q), batch.kv_pages, tables_of(batch), order=order, **place)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("dtype", ["float32", "uint16", "int8"])
def test_a_token_has_the_same_bits_as_a_decode_and_in_any_chunk(dtype, window):
    whole = ragged_batch([(300, 300)], head_dim=64, kv_dtype=dtype, window=window)
    pages, table = jax.tree.map(jnp.asarray, whole.kv_pages), whole.block_tables

    def rows(cuts: list[tuple[int, int]]) -> list[np.ndarray]:
        """Each (first, last) part of the sequence as a sequence of its own in one batch."""
        q = np.concatenate([whole.q[first:last] for first, last in cuts])
        tables = native.Tables(
            jnp.asarray(np.cumsum([0] + [last - first for first, last in cuts]), jnp.int32),
            jnp.asarray([last for _, last in cuts], jnp.int32),
            jnp.asarray(np.repeat(table, len(cuts), 0)),
        )
        place = {"layer": whole.layer, "num_layers": whole.num_layers, "window": window}
        return np.split(np.asarray(native.attention(q, pages, tables, **place)), tables.query_starts[1:-1])

    (all_at_once,) = rows([(0, 300)])
    for cuts in (
        [(299, 300)],
        [(i, i + 1) for i in (0, 63, 64, 200, 280)],
        [(0, 17), (17, 100), (100, 300)],
        [(130, 133)],
    ):
        for (first, last), part in zip(cuts, rows(cuts), strict=True):
            np.testing.assert_array_equal(part.view(np.uint32), all_at_once[first:last].view(np.uint32))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"context_lens": [9, 1]}, "a context is longer than its block table"),
        ({"block_tables": [[9], [1]]}, "a block table names a page that the pool doesn't have"),
        ({"block_tables": [[-1], [1]]}, "a block table names a page that the pool doesn't have"),
        ({"query_starts": [0, 3, 2]}, "don't fit together"),
        ({"query_starts": [0, 1, 5]}, "don't fit together"),
        ({"query_starts": [1, 1, 2]}, "must begin with 0"),
    ],
)
def test_numbers_that_would_become_stray_addresses_are_refused(change, message):
    numbers = {"query_starts": [0, 1, 2], "context_lens": [3, 1], "block_tables": [[1], [2]]} | change
    tables = native.Tables(**{name: jnp.asarray(value, jnp.int32) for name, value in numbers.items()})
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        native.attention(
            jnp.zeros((4, 2, 16)), jnp.zeros((6, 8, 1, 16)), tables, layer=0, num_layers=1
        ).block_until_ready()


def test_bad_shapes_are_refused_while_tracing():
    tables = native.Tables(jnp.zeros(3, jnp.int32), jnp.zeros(2, jnp.int32), jnp.zeros((2, 1), jnp.int32))
    place = {"layer": 0, "num_layers": 1}
    with pytest.raises(ValueError, match=r"kv_pages must be of dtype .* got int8"):
        native.attention(jnp.zeros((4, 2, 16)), jnp.zeros((6, 8, 1, 16), jnp.int8), tables, **place)
    for values, scales, message in (
        (jnp.zeros((6, 8, 1, 16)), (6, 1, 8), "kv_pages.values must be of dtype int8, got float32"),
        (jnp.zeros((6, 8, 1, 16), jnp.int8), (6, 8, 1), r"kv_pages.scales must be of shape \[6, 1, 8\]"),
    ):
        with pytest.raises(ValueError, match=message):
            native.attention(jnp.zeros((4, 2, 16)), QuantizedPages(values, jnp.zeros(scales)), tables, **place)
    with pytest.raises(ValueError, match="kv_pages must be of a head size up to 512, got 1024"):
        native.attention(jnp.zeros((4, 2, 1024)), jnp.zeros((6, 8, 1, 1024)), tables, **place)
    with pytest.raises(ValueError, match=r"qkv must be of \(n \* 1 \+ 2 \* 1\) \* 16 features, got 40"):
        native.place_and_attend(
            jnp.zeros((4, 40)), jnp.zeros((4, 8)), jnp.zeros((4, 8)), jnp.zeros((6, 8, 1, 16)), tables, **place
        )


def test_the_public_function_takes_the_backend_by_name():
    batch = ragged_batch([(1, 9)])
    metadata = attention_metadata(
        *map(jnp.asarray, (batch.query_starts, batch.context_lens, batch.block_tables)),
        num_tokens=1,
        page_size=8,
        num_heads=9,
        num_kv_heads=3,
        head_dim=16,
        backend="native",
    )
    out = ragged_paged_attention(
        jnp.asarray(batch.q, jnp.bfloat16),
        jnp.asarray(batch.kv_pages),
        metadata,
        layer=1,
        num_layers=2,
        backend="native",
    )
    assert out.dtype == jnp.bfloat16
    assert relative_error(np.asarray(out), batch.expected()) < 1e-2
