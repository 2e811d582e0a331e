"""Every kernel on the GPU that is there, against the float64 reference: `pytest tests/gpu`, 3 minutes on an H200."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from pallas_kernels import copy_pages, least_kept_weight, reference, rms_norm, rope_and_write_kv, silu_mul
from pallas_kernels.metadata import device_capability
from tests.pallas_kernels.batches import attend, ragged_batch, relative_error
from tests.pallas_kernels.test_attention import FEATURES, TOLERANCE
from tests.pallas_kernels.test_fused import rope_arguments
from tests.pallas_kernels.test_page_copy import DESTINATIONS, SOURCES, pool
from tests.pallas_kernels.test_selection import exact

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="jax finds no GPU"),
]


@pytest.mark.parametrize("heads, head_dim, page_size, window, soft_cap, sinks, dtype, kv_dtype, decode_only", FEATURES)
def test_attention(heads, head_dim, page_size, window, soft_cap, sinks, dtype, kv_dtype, decode_only):
    if kv_dtype == "float8_e4m3fn" and device_capability() < (8, 9):
        pytest.skip("this GPU has no float8")
    batch = ragged_batch(
        [(1, 1), (1, 130), (1, 9000), (1, 16)] if decode_only else [(7, 7), (1, 9000), (200, 555), (1, 1)],
        heads=heads,
        head_dim=head_dim,
        page_size=page_size,
        window=window,
        sinks=sinks,
        dtype=dtype,
        kv_dtype=kv_dtype,
        decode_only=decode_only,
    )
    step = functools.partial(attend, layer=batch.layer, num_layers=batch.num_layers, scale=None, window=window)
    step = functools.partial(step, soft_cap=soft_cap, decode_only=decode_only, backend="triton", interpret=False)
    got = np.asarray(jax.jit(step)(*batch.arrays))
    # Three TF32 products keep 5e-6 of float32.
    assert relative_error(got, batch.expected(soft_cap=soft_cap)) < max(TOLERANCE[dtype], 1e-5)


@pytest.mark.parametrize("head_dim, page_size", [(64, 16), (128, 64), (256, 64)])
def test_mosaic(head_dim, page_size):
    if device_capability() != (9, 0):
        pytest.skip("mosaic is for Hopper")
    batch = ragged_batch(
        [(7, 70), (1, 130), (400, 900)], heads=(8, 2), head_dim=head_dim, page_size=page_size, dtype="bfloat16"
    )
    step = functools.partial(attend, layer=batch.layer, num_layers=batch.num_layers, scale=None, window=None)
    step = functools.partial(step, soft_cap=None, decode_only=False, backend="mosaic", interpret=False)
    assert relative_error(np.asarray(jax.jit(step)(*batch.arrays)), batch.expected()) < 1e-2


def test_copy_pages():
    before = pool("bfloat16")
    got = np.asarray(jax.jit(functools.partial(copy_pages, backend="triton"))(before, SOURCES, DESTINATIONS))
    np.testing.assert_array_equal(got, reference.copy_pages(before, SOURCES, DESTINATIONS))


def test_fused():
    rng = np.random.default_rng(0)
    x, scale = rng.standard_normal((300, 4096), np.float32), rng.standard_normal(4096, np.float32)
    got = np.asarray(rms_norm(x, scale, eps=1e-5, backend="triton"))
    assert relative_error(got, reference.rms_norm(x, scale, eps=1e-5)) < 1e-6
    assert relative_error(np.asarray(silu_mul(x, backend="triton")), reference.silu_mul(x)) < 1e-6
    arguments = rope_arguments((9, 3), 64, "bfloat16")
    write = functools.partial(rope_and_write_kv, layer=1, num_layers=3, backend="triton")
    q, pages, arrivals = jax.jit(write)(*arguments)
    want_q, want_pages = reference.rope_and_write_kv(*arguments, layer=1, num_layers=3)
    assert relative_error(np.asarray(q), want_q) < 1e-2
    assert relative_error(np.asarray(pages)[6:], want_pages[6:]) < 1e-2
    assert not np.asarray(arrivals).any()


@pytest.mark.parametrize("steep", [0.3, 30.0])
def test_top_k_and_top_p(steep):
    """Flat rows, and rows that are gathered; sums are exact in any order."""
    rng = np.random.default_rng(0)
    weights = exact(rng, (300, 131_071), steep, 0.5)
    top_k = rng.choice([0, 1, 50, 1000, 131_071], 300).astype(np.int32)
    top_p = rng.choice([0.0, 0.5, 0.96875, 1.0], 300).astype(np.float32)
    got = np.asarray(jax.jit(least_kept_weight)(weights, top_k, top_p))
    np.testing.assert_array_equal(got, reference.least_kept_weight(weights, top_k, top_p))
