"""The fused small kernels of both backends against numpy in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import (
    HeadNorm,
    LateNorm,
    RawQueries,
    add_rms_norm,
    attention_metadata,
    ragged_paged_attention,
    reference,
    rms_norm,
    rope_and_write_kv,
    silu_mul,
)
from tests.pallas_kernels.batches import relative_error

BACKENDS = ["xla", "triton"]
TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-2}
STATIC = ("layer", "num_layers", "backend", "interpret")
rope_write = jax.jit(rope_and_write_kv, static_argnames=STATIC)
RNG = np.random.default_rng(0)


def rows(*shape: int, dtype: str = "float32") -> np.ndarray:
    return RNG.standard_normal(shape).astype(jnp.dtype(dtype))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype, size", [("float32", 576), ("bfloat16", 64)])
def test_rms_norm(backend, dtype, size):
    x, scale = rows(5, size, dtype=dtype), rows(size)
    got = np.asarray(rms_norm(x, scale, eps=1e-5, backend=backend, interpret=True))
    assert got.dtype == x.dtype
    assert relative_error(got, reference.rms_norm(x, scale, eps=1e-5)) < TOLERANCE[dtype]


@pytest.mark.parametrize("backend", BACKENDS)
def test_add_rms_norm(backend):
    x, y, scale = rows(3, 72), rows(3, 72), rows(72)
    total, normed = add_rms_norm(x, y, scale, eps=1e-5, backend=backend, interpret=True)
    want_total, want_normed = reference.add_rms_norm(x, y, scale, eps=1e-5)
    assert relative_error(np.asarray(total), want_total) < 1e-6
    assert relative_error(np.asarray(normed), want_normed) < 1e-6
    with pytest.raises(ValueError, match=r"y must be of shape \[3, 72\], got shape \[3, 7\]"):
        add_rms_norm(x, rows(3, 7), scale, eps=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype, size", [("float32", 1536), ("bfloat16", 100)])
def test_silu_mul(backend, dtype, size):
    gate_up = rows(3, 2 * size, dtype=dtype)
    got = np.asarray(silu_mul(gate_up, backend=backend, interpret=True))
    assert got.dtype == gate_up.dtype
    assert relative_error(got, reference.silu_mul(gate_up)) < TOLERANCE[dtype]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("biased", [False, True])
def test_silu_mul_after_a_late_norm(backend, biased):
    gate_up, late = rows(3, 2 * 40), LateNorm(10 * rows(3, 24), 1e-5, rows(80) if biased else None)
    got = np.asarray(silu_mul(gate_up, late_norm=late, backend=backend, interpret=True))
    assert relative_error(got, reference.silu_mul(gate_up, late_norm=late)) < 1e-6
    assert relative_error(got, reference.silu_mul(gate_up)) > 1e-2


def test_a_late_norm_is_the_norm_before_the_product():
    """``norm(x) @ W.T + b`` with the scale in the weights, and the rest in the kernel after the product."""
    x, scale, kernel, bias = rows(3, 24), rows(24), rows(80, 24), rows(80)
    plain = reference.silu_mul(reference.rms_norm(x, scale, eps=1e-5) @ kernel.T + bias)
    folded = (x @ (kernel * scale).T).astype(np.float32)
    late = silu_mul(folded, late_norm=LateNorm(x, 1e-5, bias), backend="triton", interpret=True)
    assert relative_error(np.asarray(late), plain) < 1e-6


def rope_arguments(heads: tuple[int, int], head_dim: int, dtype: str):
    num_heads, num_kv_heads = heads
    angles = RNG.uniform(0, 100, (6, head_dim // 2)).astype(np.float32)
    pages = np.array([5, 5, 9, 13, 0, 0], np.int32)
    offsets = np.array([14, 15, 0, 7, 3, 3], np.int32)
    pool = rows(14 * 3 * 2, 16, num_kv_heads, head_dim, dtype=dtype)
    return (
        pool,
        rows(6, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype),
        np.cos(angles),
        np.sin(angles),
        pages,
        offsets,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "heads, head_dim, dtype", [((9, 3), 64, "float32"), ((32, 8), 16, "bfloat16"), ((5, 1), 80, "float32")]
)
def test_rope_and_write_kv(backend, heads, head_dim, dtype):
    """Queries come back rotated, rotated keys and plain values lie in their pages, and nothing else changes."""
    arguments = rope_arguments(heads, head_dim, dtype)
    q, pool, _ = rope_write(*arguments, layer=1, num_layers=3, backend=backend, interpret=True)
    want_q, want_pool = reference.rope_and_write_kv(*arguments, layer=1, num_layers=3)
    assert relative_error(np.asarray(q), want_q) < TOLERANCE[dtype]
    past_trash = np.asarray(pool)[6:].astype(np.float64)
    assert relative_error(past_trash, want_pool[6:]) < TOLERANCE[dtype]
    untouched = np.ones(len(pool), bool)
    untouched[[5 * 6 + 2, 5 * 6 + 3, 9 * 6 + 2, 9 * 6 + 3, 13 * 6 + 2, 13 * 6 + 3, 2, 3]] = False
    np.testing.assert_array_equal(np.asarray(pool)[untouched], arguments[0][untouched])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "heads, head_dim, head, late, biased",
    [((20, 5), 80, True, False, False), ((4, 2), 32, False, True, False), ((5, 1), 24, True, True, True)],
)
def test_norms_on_the_way_into_the_pages(backend, heads, head_dim, head, late, biased):
    arguments = rope_arguments(heads, head_dim, "float32")
    size = sum(heads) + heads[1]
    norms = {
        "head_norm": HeadNorm(rows(head_dim), rows(head_dim), 1e-6) if head else None,
        "late_norm": LateNorm(5 * rows(6, 24), 1e-5, rows(size * head_dim) if biased else None) if late else None,
    }
    options = {"layer": 1, "num_layers": 3, "backend": backend, "interpret": True} | norms
    q, pool, arrivals = jax.jit(functools.partial(rope_and_write_kv, **options))(*arguments)
    want_q, want_pool = reference.rope_and_write_kv(*arguments, layer=1, num_layers=3, **norms)
    assert relative_error(np.asarray(q), want_q) < 1e-6
    assert relative_error(np.asarray(pool)[6:], want_pool[6:]) < 1e-6
    assert (arrivals is None) == (backend == "xla")
    assert arrivals is None or (not np.asarray(arrivals).any() and arrivals.shape == (6, heads[1]))


def attend_finished_and_raw(late: bool, *, interpret: bool) -> tuple[np.ndarray, np.ndarray]:
    """Decodes with queries that were rotated before, and with raw ones; the longest context is split, the last row is
    padding."""
    num_heads, num_kv_heads, head_dim = 6, 2, 24
    pool, qkv, cos, sin, _, _ = rope_arguments((num_heads, num_kv_heads), head_dim, "float32")
    qkv, cos, sin = qkv[:4], cos[:4], sin[:4]
    contexts = np.array([40, 600, 700, 0], np.int32)
    tables = np.zeros((4, 44), np.int32)
    for row, context in enumerate(contexts):
        tables[row, : -(-context // 16)] = RNG.integers(1, 14, -(-context // 16))
    size = num_heads + 2 * num_kv_heads
    norms = {
        "head_norm": HeadNorm(rows(head_dim), rows(head_dim), 1e-6) if late else None,
        "late_norm": LateNorm(5 * rows(4, 24), 1e-5, rows(size * head_dim)) if late else None,
    }

    def attend(pool, qkv, raw: bool):
        zero = jnp.zeros(4, jnp.int32)
        options = {"layer": 1, "num_layers": 3, "backend": "triton", "interpret": interpret}
        rotated = rope_and_write_kv(pool, qkv, cos, sin, zero, zero, queries=not raw, **norms, **options)
        assert (rotated.q is None) == raw
        metadata = attention_metadata(
            jnp.arange(5, dtype=jnp.int32),
            jnp.asarray(contexts),
            jnp.asarray(tables),
            num_tokens=4,
            page_size=16,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            decode_only=True,
            backend="triton",
        )
        q = RawQueries(qkv, num_heads, cos, sin, **norms) if raw else rotated.q
        return ragged_paged_attention(q, rotated.kv_pages, metadata, arrivals=rotated.arrivals, **options)

    fast_to_compile = {"xla_backend_optimization_level": 0} if interpret else None
    finished, raw = (
        np.asarray(jax.jit(functools.partial(attend, raw=raw), compiler_options=fast_to_compile)(pool, qkv))
        for raw in (False, True)
    )
    return finished, raw


@pytest.mark.parametrize("late", [False, True])
def test_decodes_attend_with_queries_that_they_finish_themselves(late):
    finished, raw = attend_finished_and_raw(late, interpret=True)
    assert np.abs(finished[:3]).max() > 0.1 and not raw[3].any()
    assert relative_error(raw, finished.astype(np.float64)) < 1e-5


def test_pages_of_bits_take_rotated_keys():
    arguments = list(rope_arguments((9, 3), 64, "bfloat16"))
    pool = rope_write(*arguments, layer=1, num_layers=3, backend="xla").kv_pages
    arguments[0] = arguments[0].view(np.uint16)
    bits = rope_write(*arguments, layer=1, num_layers=3, backend="xla").kv_pages
    np.testing.assert_array_equal(np.asarray(bits).view(ml_dtypes.bfloat16), np.asarray(pool))


def test_a_donated_pool_is_written_in_place():
    arguments = rope_arguments((9, 3), 64, "float32")
    write = jax.jit(rope_and_write_kv, static_argnames=STATIC, donate_argnums=0)
    memory = write.lower(*arguments, layer=1, num_layers=3, backend="xla").compile().memory_analysis()
    assert memory.alias_size_in_bytes == arguments[0].nbytes


def test_wrong_arguments_are_refused():
    pool, qkv, cos, sin, pages, offsets = rope_arguments((9, 3), 64, "float32")
    with pytest.raises(ValueError, match=r"qkv must be of 2 \* 3 heads and a multiple of 3 query heads, got 14 heads"):
        rope_and_write_kv(pool, qkv[:, :14], cos, sin, pages, offsets, layer=0, num_layers=3)
    with pytest.raises(ValueError, match=r"sin must be of shape \[6, 32\], got shape \[6, 16\]"):
        rope_and_write_kv(pool, qkv, cos, sin[:, :16], pages, offsets, layer=0, num_layers=3)
    with pytest.raises(ValueError, match=r"scale must be of shape \[8\], got shape \[4\]"):
        rms_norm(rows(2, 8), rows(4), eps=1e-5)
    with pytest.raises(ValueError, match=r"late_norm.x must be of shape \[2, any\], got shape \[3, 4\]"):
        silu_mul(rows(2, 8), late_norm=LateNorm(rows(3, 4), 1e-5))
    with pytest.raises(ValueError, match=r"late_norm.bias must be of shape \[8\], got shape \[4\]"):
        silu_mul(rows(2, 8), late_norm=LateNorm(rows(2, 4), 1e-5, rows(4)))
    with pytest.raises(ValueError, match=r"head_norm.k_scale must be of shape \[64\], got shape \[32\]"):
        norm = HeadNorm(rows(64), rows(32), 1e-5)
        rope_and_write_kv(pool, qkv, cos, sin, pages, offsets, layer=0, num_layers=3, head_norm=norm)
    with pytest.raises(ValueError, match="gate_up must be of an even number of columns, got 7"):
        silu_mul(rows(2, 7))
