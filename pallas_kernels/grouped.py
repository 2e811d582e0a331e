"""Products of groups of rows, each group with a kernel of its own: the experts of a mixture.

A mixture of G = 3 experts, of which each of T = 3 tokens takes two: R = 6 rows, in the order of their experts. A fourth
pair of rows belongs to padding, which takes expert 3, that isn't there.

    experts   [[2, 0], [0, 1], [0, 2], [3, 3]]     of the tokens
    order     [1, 2, 4, 3, 0, 5, 6, 7]             pairs by their experts; pair p is choice p % 2 of token p // 2
    starts    [0, 3, 4, 6]                         expert g has rows starts[g] to starts[g + 1]
    places    [4, 0, 1, 3, 2, 5, 6, 7]             where each pair stands

Nothing is dropped and no group has a capacity, so that a row of the result depends on its own row alone.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int, Int32

from pallas_kernels.checks import require, require_array, require_dtype, require_integer
from pallas_kernels.metadata import Backend, chosen_backend
from pallas_kernels.pages import PLAIN_DTYPES
from pallas_kernels.triton import grouped as triton
from pallas_kernels.xla import grouped as xla

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")


class Groups(NamedTuple):
    """Pairs of a token and one of its experts, in the order of the experts. R pairs, G experts."""

    order: Int32[Array, "R"]
    starts: Int32[Array, "G+1"]
    """What lies past the last one is nobody's."""
    places: Int32[Array, "R"]


def group_rows(experts: Int[Array, "T k"], num_groups: int) -> Groups:
    """The rows of each expert. Numbers outside of 0 to ``num_groups`` - 1 are nobody's.

    Raises:
        ValueError: a shape, dtype or number can't be; the message names the argument.
    """
    require_array(experts, "experts", (None, None), dtypes=INTEGERS)
    require_integer(num_groups, "num_groups")
    flat = experts.reshape(-1).astype(jnp.int32)
    flat = jnp.where((flat >= 0) & (flat < num_groups), flat, num_groups)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    starts = jnp.sum(flat[None, :] < jnp.arange(num_groups + 1, dtype=jnp.int32)[:, None], 1, dtype=jnp.int32)
    places = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=jnp.int32), unique_indices=True)
    return Groups(order, starts, places)


def grouped_product(
    x: Float[Array, "N I"],
    kernels: Float[Array, "G O I"],
    starts: Int32[Array, "G+1"],
    rows: Int32[Array, "R"] | None = None,
    *,
    dtype: DTypeLike | None = None,
    backend: Backend | None = None,
    interpret: bool = False,
) -> Float[Array, "R O"]:
    """``x[rows[r]] @ kernels[g].T`` for the rows r of each group g, accumulated in float32.

    Weights are read of the groups that have rows. A row's bits don't depend on the other rows, on a CPU nor on how many
    there are. It has no gradient.

    Arguments:
        x: is taken in the kernels' dtype.
        starts: group g has the results ``starts[g]`` to ``starts[g + 1]``; those past the last are not computed: they
            come out as 0 from xla, as anything from triton.
        rows: of x; None: each in its turn.
        dtype: of the result; None: the kernels'.

    Raises:
        ValueError: a shape or dtype can't be; the message names the argument.
    """
    backend = chosen_backend(backend)
    require(backend != "native", "backend", "None or one of xla, triton, mosaic", repr(backend))
    require_array(kernels, "kernels", (None, None, None), dtypes=PLAIN_DTYPES)
    G, _, I = kernels.shape  # noqa: E741  # the letter of the shape
    require_array(x, "x", (None, I), dtypes=PLAIN_DTYPES)
    require_array(starts, "starts", (G + 1,), dtypes=("int32",))
    if rows is not None:
        require_array(rows, "rows", (None,), dtypes=("int32",))
    dtype = require_dtype(kernels.dtype if dtype is None else dtype, "dtype", PLAIN_DTYPES)
    x = x.astype(kernels.dtype)
    if backend == "xla":
        return xla.grouped_product(x if rows is None else x[rows], kernels, starts, dtype)
    rows = jnp.arange(x.shape[0], dtype=jnp.int32) if rows is None else rows
    return triton.grouped_product(x, kernels, starts, rows, dtype, interpret=interpret)
