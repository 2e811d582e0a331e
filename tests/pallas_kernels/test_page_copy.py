"""copy_pages, gather_pages and scatter_pages: what they move, what they leave alone, and that they copy no pool."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import copy_pages, gather_pages, reference, scatter_pages

SHAPE = (16, 3, 2, 8, 3, 20)
"""A page holds 2,880 elements: no power of two, and more than one program copies in float32."""
SOURCES = np.array([3, 3, 7, 0, 0], np.int32)
DESTINATIONS = np.array([5, 9, 1, 0, 0], np.int32)
"""One page to two places, another, two pairs of padding."""
COPIES = {
    "xla": functools.partial(copy_pages, backend="xla"),
    "triton": functools.partial(copy_pages, backend="triton", interpret=True),
}


INTERPRETED = {"xla": {"backend": "xla"}, "triton": {"backend": "triton", "interpret": True}}


def pool(dtype: str, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).integers(0, 250, SHAPE)
    return values.astype(jnp.dtype(dtype))


@pytest.mark.parametrize("backend", COPIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint16", "int8", "float8_e4m3fn"])
def test_destinations_hold_their_sources_and_nothing_else_changes(backend, dtype):
    before = pool(dtype)
    got = np.asarray(jax.jit(COPIES[backend])(before, SOURCES, DESTINATIONS))
    want = reference.copy_pages(before, SOURCES, DESTINATIONS)
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))
    assert (want[9] == before[3]).all() and (want[1] != before[1]).any()


@pytest.mark.parametrize("backend", INTERPRETED)
@pytest.mark.parametrize("dtype", ["float32", "uint16", "float8_e4m3fn"])
def test_pages_leave_the_pool_and_come_into_it(backend, dtype):
    """As in a swap: nothing else changes, but for the trash page, where padding goes."""
    before, other = pool(dtype), pool(dtype, seed=1)[: len(DESTINATIONS)]
    options = INTERPRETED[backend]
    taken = np.asarray(jax.jit(functools.partial(gather_pages, **options))(before, SOURCES))
    np.testing.assert_array_equal(taken.view(np.uint8), reference.gather_pages(before, SOURCES).view(np.uint8))
    written = np.asarray(jax.jit(functools.partial(scatter_pages, **options))(before, DESTINATIONS, other))
    want = reference.scatter_pages(before, DESTINATIONS, other)
    np.testing.assert_array_equal(written[1:].view(np.uint8), want[1:].view(np.uint8))
    assert (want[9] == other[1]).all() and (want[9].view(np.uint8) != before[9].view(np.uint8)).any()


def test_a_page_may_be_overwritten_after_it_was_read():
    before = pool("float32")
    swapped = np.asarray(COPIES["xla"](before, jnp.array([1, 2]), jnp.array([2, 1])))
    np.testing.assert_array_equal(swapped[[1, 2]], before[[2, 1]])


@pytest.mark.parametrize("backend", COPIES)
def test_a_pytree_of_arrays_is_copied_leaf_by_leaf(backend):
    before = {"values": pool("int8"), "scales": pool("float32")[..., 0]}
    got = COPIES[backend](before, SOURCES, DESTINATIONS)
    for name, leaf in before.items():
        np.testing.assert_array_equal(got[name], reference.copy_pages(leaf, SOURCES, DESTINATIONS))


def test_pages_come_back_from_a_round_trip_through_the_host():
    before = pool("uint16")
    rows = jax.device_get(gather_pages(before, SOURCES))
    np.testing.assert_array_equal(rows, before[SOURCES])
    empty = np.zeros_like(before)
    back = np.asarray(scatter_pages(empty, DESTINATIONS, rows))
    np.testing.assert_array_equal(back[DESTINATIONS[:3]], before[SOURCES[:3]])
    assert not back[[2, 3, 4, 6, 7, 8]].any()


@pytest.mark.parametrize("dtype", ["float32", "uint16", "int8"])
@pytest.mark.parametrize("move", [COPIES["xla"], lambda kv, a, b: scatter_pages(kv, b, gather_pages(kv, a))])
def test_a_donated_pool_is_not_copied(dtype, move):
    kv = jax.ShapeDtypeStruct((256, *SHAPE[1:]), dtype)
    memory = jax.jit(move, donate_argnums=0).lower(kv, SOURCES, DESTINATIONS).compile().memory_analysis()
    size = 256 * 2880 * kv.dtype.itemsize
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 8


def test_a_page_that_is_no_whole_words_moves_too():
    before = np.arange(16 * 9).astype(np.int8).reshape(16, 3, 3)
    got = np.asarray(COPIES["triton"](before, SOURCES, DESTINATIONS))
    np.testing.assert_array_equal(got, reference.copy_pages(before, SOURCES, DESTINATIONS))


def test_wrong_arguments_are_refused():
    kv = pool("float32")
    with pytest.raises(ValueError, match=r"destinations must be of shape \[5\], got shape \[3\]"):
        copy_pages(kv, SOURCES, DESTINATIONS[:3])
    with pytest.raises(ValueError, match="sources must be of dtype int32, got float32"):
        copy_pages(kv, SOURCES.astype(np.float32), DESTINATIONS)
    with pytest.raises(ValueError, match="backend must be None or one of xla, triton, mosaic, native, got 'cuda'"):
        copy_pages(kv, SOURCES, DESTINATIONS, backend="cuda")
    with pytest.raises(ValueError, match="backend must be None or one of xla, triton, mosaic, native, got 'cuda'"):
        gather_pages(kv, SOURCES, backend="cuda")
    with pytest.raises(ValueError, match="backend must be None or one of xla, triton, mosaic, native, got 'cuda'"):
        scatter_pages(kv, DESTINATIONS, kv[:5], backend="cuda")
    with pytest.raises(ValueError, match=r"rows must be of shape \[5, 3, 2, 8, 3, 20\], got shape \[4, 3, 2, 8, 3, 20"):
        scatter_pages(kv, DESTINATIONS, kv[:4])
    with pytest.raises(ValueError, match="rows must be of dtype float32, got float16"):
        scatter_pages(kv, DESTINATIONS, kv[:5].astype(np.float16))
    with pytest.raises(ValueError, match="kv must be of 16 pages, got 4 pages"):
        gather_pages((kv, kv[:4]), SOURCES)
