"""Every public kernel on the GPU that is there, against the float64 reference: `pytest tests/gpu`.

Without a GPU the same code runs in Pallas's interpreter on a few short cases, so that it works when one is there.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.small_kernels import small_calls
from pallas_kernels import (
    Backend,
    HeadNorm,
    LateNorm,
    QuantizedPages,
    attention_metadata,
    decode_attention,
    least_kept_weight,
    reference,
    rms_norm,
    rope_and_write_kv,
    silu_mul,
    write_kv,
)
from pallas_kernels.triton.targets import default_target, device_capability
from tests.pallas_kernels.batches import attend, ragged_batch, relative_error, stored
from tests.pallas_kernels.test_attention import TABLE, TOLERANCE, batch_of, words
from tests.pallas_kernels.test_fused import attend_finished_and_raw, rope_arguments
from tests.pallas_kernels.test_selection import exact

ON_GPU = jax.default_backend() == "gpu"
ROWS = [row | {"backend": "triton"} for row in (TABLE[:16] if ON_GPU else TABLE[:2])]
LONGEST = 9000 if ON_GPU else 300
BACKENDS: tuple[Backend, ...] = ("triton", "xla")
OPTIONS = None if ON_GPU else {"xla_backend_optimization_level": 0}
on_device = functools.partial(jax.jit, compiler_options=OPTIONS)
TF32_ERROR = 1e-5
"""Three TF32 products keep 5e-6 of float32."""


def options(backend: Backend) -> dict[str, Any]:
    return {"backend": backend} | ({"interpret": not ON_GPU} if backend == "triton" else {})


@pytest.mark.parametrize("row", ROWS, ids=words)
def test_attention(row):
    if row["kv_dtype"] == "float8_e4m3fn" and not default_target().has_float8:
        pytest.skip("this GPU has no float8")
    batch = batch_of(row, longest=LONGEST)
    given = {name: row[name] for name in ("window", "scale", "soft_cap", "decode_only", "one_path")}
    step = functools.partial(attend, layer=batch.layer, num_layers=batch.num_layers, **given)
    got = np.asarray(on_device(functools.partial(step, backend="triton", interpret=not ON_GPU))(*batch.arrays))
    want = batch.expected(soft_cap=row["soft_cap"], scale=row["scale"])
    assert relative_error(got, want) < max(TOLERANCE[row["dtype"]], TF32_ERROR)


@pytest.mark.parametrize("backend", BACKENDS)
def test_decode_attention(backend):
    batch = ragged_batch([(1, LONGEST), (1, 1), (1, 600)], decode_only=True, num_seqs=4, head_dim=64, dtype="bfloat16")

    def decode(q: Any, pages: Any, contexts: Any, tables: Any) -> jax.Array:
        shapes = {"page_size": 8, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
        starts = jnp.arange(5, dtype=jnp.int32)
        built = attention_metadata(starts, contexts, tables, num_tokens=4, decode_only=True, backend=backend, **shapes)
        return decode_attention(q, pages, built, layer=1, num_layers=2, **options(backend))

    arrays = (batch.q, batch.kv_pages, batch.context_lens, batch.block_tables)
    got = np.asarray(on_device(decode)(*arrays))
    assert relative_error(got, reference.decode_attention(*arrays, layer=1, num_layers=2)) < 1e-2


@pytest.mark.parametrize("late", [False, True])
def test_raw_queries(late):
    finished, raw = attend_finished_and_raw(late, interpret=not ON_GPU)
    assert relative_error(raw, finished.astype(np.float64)) < TF32_ERROR


@pytest.mark.parametrize("head_dim, page_size", [(64, 16), (128, 64), (256, 64)])
def test_mosaic(head_dim, page_size):
    if not ON_GPU or device_capability() != (9, 0):
        pytest.skip("mosaic is for Hopper; tests/pallas_kernels/test_mosaic.py has its interpreter")
    batch = ragged_batch(
        [(7, 70), (1, 130), (400, 900)], heads=(8, 2), head_dim=head_dim, page_size=page_size, dtype="bfloat16"
    )
    step = functools.partial(attend, layer=batch.layer, num_layers=batch.num_layers, scale=None, window=None)
    step = functools.partial(step, soft_cap=None, decode_only=False, backend="mosaic", interpret=False)
    assert relative_error(np.asarray(jax.jit(step)(*batch.arrays)), batch.expected()) < 1e-2


CALLS = small_calls(small=not ON_GPU, seed=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CALLS)
def test_kernels_beside_attention(name, backend):
    """Norms, SiLU x up, RoPE, the KV write, page moves, products of experts and selection, in bfloat16."""
    assert CALLS[name].error(backend, interpret=not ON_GPU) < 1e-2


def test_float32_rows():
    rng = np.random.default_rng(0)
    x, scale = rng.standard_normal((30, 4096), np.float32), rng.standard_normal(4096, np.float32)
    late = LateNorm(x[:, :1000], 1e-5, scale)
    triton = options("triton")
    got = np.asarray(rms_norm(x, scale, eps=1e-5, **triton))
    assert relative_error(got, reference.rms_norm(x, scale, eps=1e-5)) < 1e-6
    for norm in (None, late):
        got = np.asarray(silu_mul(x, late_norm=norm, **triton))
        assert relative_error(got, reference.silu_mul(x, late_norm=norm)) < 1e-6


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float32"])
def test_write_kv(dtype):
    rng = np.random.default_rng(0)
    pages, (k, v) = rng.standard_normal((8, 16, 3, 64), np.float32), rng.standard_normal((2, 5, 3, 64), np.float32)
    pool, at = stored(pages, dtype), (np.array([1, 1, 2, 3, 3], np.int32), np.array([14, 15, 0, 7, 3], np.int32))
    got = jax.jit(functools.partial(write_kv, layer=0, num_layers=1))(pool, k, v, *at)
    want = reference.write_kv(pool, k, v, *at, layer=0, num_layers=1)
    if isinstance(want, QuantizedPages):
        np.testing.assert_allclose(got.scales, want.scales, rtol=1e-6)
        got, want = got.values, want.values
    same = np.asarray(got).view(np.uint8) == want.view(np.uint8)
    assert same.mean() > 0.999, "a device may round a tie the other way"


@pytest.mark.parametrize("queries", [True, False])
def test_rope_with_norms(queries):
    arguments = rope_arguments((9, 3), 64, "bfloat16")
    rng = np.random.default_rng(0)
    scale, x = rng.standard_normal(64, np.float32), rng.standard_normal((6, 576), np.float32)
    norms = {"head_norm": HeadNorm(scale, scale, 1e-6), "late_norm": LateNorm(5 * x, 1e-5)}
    write = functools.partial(rope_and_write_kv, layer=1, num_layers=3, queries=queries, **norms, **options("triton"))
    q, pages, arrivals = on_device(write)(*arguments)
    want_q, want_pages = reference.rope_and_write_kv(*arguments, layer=1, num_layers=3, **norms)
    assert q is None if not queries else relative_error(np.asarray(q), want_q) < 1e-2
    assert relative_error(np.asarray(pages)[6:], want_pages[6:]) < 1e-2
    assert not np.asarray(arrivals).any()


@pytest.mark.parametrize("steep", [0.3, 30.0])
def test_top_k_and_top_p(steep):
    """Flat rows, and rows that are gathered; sums are exact in any order."""
    rng = np.random.default_rng(0)
    num_rows, size = (300, 131_071) if ON_GPU else (4, 5000)
    weights = exact(rng, (num_rows, size), steep, 0.5)
    top_k = rng.choice([0, 1, 50, 1000, size], num_rows).astype(np.int32)
    top_p = rng.choice([0.0, 0.5, 0.96875, 1.0], num_rows).astype(np.float32)
    got = np.asarray(jax.jit(functools.partial(least_kept_weight, **options("triton")))(weights, top_k, top_p))
    np.testing.assert_array_equal(got, reference.least_kept_weight(weights, top_k, top_p))
