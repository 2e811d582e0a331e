"""Products of groups of rows on XLA: blocks of rows of one group, each with that group's kernel."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int, Int32

ROWS = 16
"""Of a block. All blocks have one shape, so that a row has the same bits in a step of any size."""
_CONTRACT_LAST = (((1,), (1,)), ((), ()))


def grouped_product(
    x: Float[Array, "R I"], kernels: Float[Array, "G O I"], starts: Int32[Array, "G+1"], dtype: DTypeLike
) -> Float[Array, "R O"]:
    """:func:`pallas_kernels.grouped_product`, arguments already checked.

    ``lax.ragged_dot`` multiplies every row with every kernel on CPUs and GPUs: 100 times as slow for the 8 experts of a
    token, out of 32.
    """
    num_rows, num_outputs = x.shape[0], kernels.shape[1]
    blocks = -(-jnp.diff(starts) // ROWS)
    ends = jnp.cumsum(blocks)
    padded = jnp.pad(x, ((0, ROWS), (0, 0)))
    # As plain integers: else XLA's CPU backend widens the 16-bit kernels of all groups before it takes one.
    bits = lax.bitcast_convert_type(kernels, f"uint{8 * kernels.dtype.itemsize}")

    def one_block(i: Int[Array, ""], results: Float[Array, "R+16 O"]) -> Float[Array, "R+16 O"]:
        group = jnp.sum(ends <= i, dtype=jnp.int32)
        first = starts[group] + (i - ends[group] + blocks[group]) * ROWS
        rows = lax.dynamic_slice_in_dim(padded, first, ROWS)
        kernel = lax.bitcast_convert_type(lax.dynamic_index_in_dim(bits, group, 0, keepdims=False), kernels.dtype)
        y = jnp.where((first + jnp.arange(ROWS) < starts[group + 1])[:, None], _product(rows, kernel), 0)
        # What follows a group's rows is 0, until the next group writes its own there.
        return lax.dynamic_update_slice_in_dim(results, y.astype(dtype), first, 0)

    results = jnp.zeros((num_rows + ROWS, num_outputs), dtype)
    return lax.fori_loop(0, ends[-1], one_block, results)[:num_rows]


def _product(x: Float[Array, "16 I"], kernel: Float[Array, "O I"]) -> Float[Array, "16 O"]:
    """XLA's CPU backend is faster with a float32 kernel as the left operand, with a 16-bit one as the right."""
    if kernel.dtype != jnp.float32:
        return lax.dot_general(x, kernel, _CONTRACT_LAST, preferred_element_type=jnp.float32)
    return lax.optimization_barrier(lax.dot_general(kernel, x, _CONTRACT_LAST, preferred_element_type=jnp.float32)).T
