from __future__ import annotations

import gc
import itertools
import weakref

import jax
import numpy as np
import pytest

from jaxcb.weights import load_params, resolve
from jaxcb.weights.memory import Arena
from tests.conftest import GOLDEN


def test_arrays_share_no_byte_and_lie_where_xla_copies_nothing():
    shapes = [(3, 5), (1,), (7, 2, 9), (64,), (0, 4)]
    arena = Arena(shapes, np.dtype("uint16"))
    arrays = [arena.take(shape) for shape in shapes]
    for number, array in enumerate(arrays, 1):
        assert not array.any()
        array[...] = number
    for number, (array, shape) in enumerate(zip(arrays, shapes, strict=True), 1):
        assert array.shape == shape and (array == number).all()
        if array.size:
            assert jax.device_put(array).unsafe_buffer_pointer() == array.ctypes.data


def test_more_than_was_announced_is_refused():
    arena = Arena([(8,)], np.dtype("float32"))
    arena.take((8,))
    with pytest.raises(ValueError, match="buffer"):
        arena.take((1000,))


def test_the_memory_outlives_its_arena_and_goes_with_the_last_array():
    array = jax.device_put(Arena([(100,)], np.dtype("float32")).take((100,)))
    gc.collect()
    assert float(array.sum()) == 0.0
    arena = Arena([(100,)], np.dtype("float32"))
    memory = weakref.ref(arena._memory)
    taken = jax.device_put(arena.take((100,)))
    del arena
    gc.collect()
    assert memory() is not None
    del taken
    gc.collect()
    assert memory() is None


def test_weights_are_loaded_into_one_piece_of_memory():
    files = resolve(str(GOLDEN / "tiny" / "llama"))
    spec = files.read_spec()
    params = load_params(files, spec, np.dtype("float32"))
    weights = [leaf for leaf in jax.tree.leaves(params) if leaf.ndim == 2]
    starts = sorted((leaf.unsafe_buffer_pointer(), leaf.nbytes) for leaf in weights)
    for (start, size), (following, _) in itertools.pairwise(starts):
        assert following == start + -(-size // 64) * 64
