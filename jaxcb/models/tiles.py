"""Row-wise functions in tiles of a fixed number of rows, so that a row has the same bits however many others there are.

Compilers choose how to sum a product or a norm by the shape at hand: in a step of 8 tokens a row comes out with other
bits than in one of 512. Here a function of rows only ever sees one shape. All rows of a tile are summed alike (on a
CPU a tile is a multiple of the rows that a product holds in registers, on a GPU what one tile of a product takes),
and a loop's body is compiled by itself, whatever stands around it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from pallas_kernels.platform import platform

T = TypeVar("T")
CPU_ROWS, GPU_ROWS = 16, 64
"""Rows of a tile. On a CPU a step of one token computes a whole tile: of a product 576 x 3,072 on two cores with AVX2
8 rows take as long as 16, and 32 take 1.7 times as long. On a GPU the rows of one wgmma, or of four mma.
"""
SAMPLER_ROWS = 8
"""The same for rows of logits: the least that a GPU's bucket has."""


@runtime_checkable
class InTiles(Protocol):
    """Calls a row-wise function with arrays (or trees of arrays) whose leading axes are rows."""

    def __call__(self, function: Callable[..., T], *arrays: Any) -> T: ...


def directly(function: Callable[..., T], *arrays: Any) -> T:
    """All rows at once: the fastest way, whose bits depend on their number."""
    return function(*arrays)


def tiles_of(rows: int, num_rows: Int[Array, ""]) -> InTiles:
    """The first ``num_rows`` rows in tiles of ``rows``; rows of tiles that hold none of them come out as 0.

    On a GPU every tile is computed: a loop whose length only the device knows would make the host wait for it.
    """

    def in_tiles(function: Callable[..., T], *arrays: Any) -> T:
        count = jax.tree.leaves(arrays)[0].shape[0]
        padded = jax.tree.map(lambda array: _padded(array, -count % rows), arrays)
        shapes = jax.eval_shape(
            function, *jax.tree.map(lambda a: jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype), arrays)
        )
        results = jax.tree.map(lambda s: jnp.zeros((count + -count % rows, *s.shape[1:]), s.dtype), shapes)

        def one_tile(i: Int[Array, ""], results: T) -> T:
            parts = jax.tree.map(lambda array: lax.dynamic_slice_in_dim(array, i * rows, rows), padded)
            # Without barriers the compiler fuses the function with the copies around it, in each program its own way.
            computed = lax.optimization_barrier(function(*lax.optimization_barrier(parts)))
            return jax.tree.map(
                lambda whole, part: lax.dynamic_update_slice_in_dim(whole, part, i * rows, 0), results, computed
            )

        num_tiles = -(-num_rows // rows) if platform() == "cpu" else -(-count // rows)
        results = lax.fori_loop(0, num_tiles, one_tile, results)
        return jax.tree.map(lambda array: array[:count], results)

    return in_tiles


def _padded(array: Array, num_rows: int) -> Array:
    return jnp.pad(array, ((0, num_rows), *[(0, 0)] * (array.ndim - 1))) if num_rows else array
