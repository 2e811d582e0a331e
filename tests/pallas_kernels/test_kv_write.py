"""write_kv: what it writes, what it leaves alone, and that it copies no pool."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import reference, write_kv

NUM_PAGES, NUM_LAYERS, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM = 64, 3, 16, 3, 64
SHAPE = (NUM_PAGES * NUM_LAYERS * 2, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
PAGES = np.array([5, 5, 9, 63, 0, 0], np.int32)
OFFSETS = np.array([14, 15, 0, 7, 3, 3], np.int32)
"""Tokens that end a page and begin another, one of another sequence, and two padding tokens in the trash page."""


def arguments(dtype: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    pool = rng.standard_normal(SHAPE, np.float32)
    pool = pool.astype(ml_dtypes.bfloat16).view(np.uint16) if dtype == "uint16" else pool.astype(jnp.dtype(dtype))
    k, v = rng.standard_normal((2, len(PAGES), NUM_KV_HEADS, HEAD_DIM), np.float32)
    return pool, k, v


write = functools.partial(write_kv, num_layers=NUM_LAYERS, backend="xla")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint16"])
@pytest.mark.parametrize("layer", [0, 2])
def test_writes_each_row_and_nothing_else(dtype, layer):
    pool, k, v = arguments(dtype)
    got = np.asarray(jax.jit(functools.partial(write, layer=layer))(pool, k, v, PAGES, OFFSETS))
    want = reference.write_kv(pool, k, v, PAGES, OFFSETS, layer=layer, num_layers=NUM_LAYERS)
    real = slice(2 * NUM_LAYERS, None)  # past the trash page: which of its two writes wins is nobody's business
    np.testing.assert_array_equal(got[real], want[real])
    first = 5 * 2 * NUM_LAYERS + 2 * layer
    assert (want[first] != pool[first]).any() and (want[first + 1] != pool[first + 1]).any()


def test_layer_may_be_traced():
    pool, k, v = arguments("float32")
    got = np.asarray(jax.jit(write)(pool, k, v, PAGES, OFFSETS, layer=jnp.int32(1)))
    want = reference.write_kv(pool, k, v, PAGES, OFFSETS, layer=1, num_layers=NUM_LAYERS)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["float32", "uint16"])
def test_donated_pool_is_written_in_place(dtype):
    pool, k, v = arguments(dtype)

    def three_layers(pool, k, v, pages, offsets):
        for layer in range(NUM_LAYERS):
            pool = write(pool, k, v, pages, offsets, layer=layer)
        return pool

    compiled = jax.jit(three_layers, donate_argnums=0).lower(pool, k, v, PAGES, OFFSETS).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pool.nbytes
    assert memory.temp_size_in_bytes < 4 * (k.nbytes + v.nbytes)


def test_wrong_rows_are_refused():
    pool, k, v = arguments("float32")
    with pytest.raises(ValueError, match=r"v must be of shape \[6, 3, 64\], got shape \[5, 3, 64\]"):
        write(pool, k, v[:5], PAGES, OFFSETS, layer=0)
    with pytest.raises(ValueError, match=r"k must be of shape \[any, 3, 64\], got shape \[6, 3, 32\]"):
        write(pool, k[..., :32], v, PAGES, OFFSETS, layer=0)
    with pytest.raises(ValueError, match="v must be of dtype float32, got bfloat16"):
        write(pool, k, v.astype(ml_dtypes.bfloat16), PAGES, OFFSETS, layer=0)
    with pytest.raises(ValueError, match=r"num_layers must be an integer of at least 1, got 3\.0"):
        write_kv(pool, k, v, PAGES, OFFSETS, layer=0, num_layers=3.0)
    with pytest.raises(ValueError, match="offsets must be of dtype int32, got float32"):
        write(pool, k, v, PAGES, OFFSETS.astype(np.float32), layer=0)
    with pytest.raises(ValueError, match=r"kv_pages must be of dtype float32 or bfloat16 or float16, got uint16"):
        write_kv(arguments("uint16")[0], k, v, PAGES, OFFSETS, layer=0, num_layers=NUM_LAYERS, backend="triton")
