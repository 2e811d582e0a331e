"""The triton backend's products of groups of rows: tiles of rows of one group, which read that group's kernel alone."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, DTypeLike, Float, Int32

from pallas_kernels.triton.targets import default_target
from pallas_kernels.triton.tiles import PRODUCT_TILES, ProductTile, require_product_fits


class Work(NamedTuple):
    """What each program of rows computes, B at most: blocks of rows, groups in their order."""

    group: Int32[Array, "B"]
    """G where there is no work left."""
    first: Int32[Array, "B"]


def grouped_product(
    x: Float[Array, "N I"],
    kernels: Float[Array, "G O I"],
    starts: Int32[Array, "G+1"],
    rows: Int32[Array, "R"],
    dtype: DTypeLike,
    *,
    interpret: bool,
) -> Float[Array, "R O"]:
    """:func:`pallas_kernels.grouped_product`, arguments already checked."""
    num_rows, (num_groups, num_outputs, _) = rows.shape[0], kernels.shape
    target = default_target()
    tile = PRODUCT_TILES[target.name].of(kernels.dtype, num_rows=num_rows, num_groups=num_groups)
    require_product_fits(tile, target, kernels.dtype)
    precision = None
    if kernels.dtype == jnp.float32:
        precision = lax.Precision.HIGHEST if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    work = work_of(starts, num_rows, tile.rows)
    return pl.pallas_call(
        functools.partial(_kernel, tile=tile, precision=precision),
        # Programs that run beside each other have the same columns of one kernel.
        grid=(work.group.shape[0], pl.cdiv(num_outputs, tile.columns)),
        out_shape=jax.ShapeDtypeStruct((num_rows, num_outputs), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=interpret,
        name="grouped_product",
    )(x, kernels, starts, rows, work)


def work_of(starts: Int32[Array, "G+1"], num_rows: int, tile_rows: int) -> Work:
    """Of groups that together have at most ``num_rows`` rows; as many entries as they can fill, whatever they are."""
    num_groups = starts.shape[0] - 1
    hit = min(num_rows, num_groups)
    size = hit + (num_rows - hit) // tile_rows
    blocks = -(-jnp.diff(starts) // tile_rows)
    ends = jnp.cumsum(blocks, dtype=jnp.int32)
    index = jnp.arange(size, dtype=jnp.int32)
    group = jnp.sum(ends[None, :] <= index[:, None], 1, dtype=jnp.int32)
    own = jnp.minimum(group, num_groups - 1)
    return Work(group, starts[own] + (index - (ends - blocks)[own]) * tile_rows)


def _kernel(
    x_ref: Any,
    kernel_ref: Any,
    starts_ref: Any,
    rows_ref: Any,
    work: Work,
    out_ref: Any,
    *,
    tile: ProductTile,
    precision: lax.Precision | lax.DotAlgorithmPreset | None,
) -> None:
    group, column = work.group[pl.program_id(0)], pl.program_id(1) * tile.columns + jnp.arange(tile.columns)
    place = work.first[pl.program_id(0)] + jnp.arange(tile.rows)
    num_groups, num_outputs, num_inputs = kernel_ref.shape

    @pl.when(group < num_groups)
    def _multiply() -> None:
        real, in_row = place < starts_ref[group + 1], column < num_outputs
        row = plgpu.load(rows_ref.at[place], mask=real, other=0)

        def step(i: Int32[Array, ""], total: Float[Array, "rows columns"]) -> Float[Array, "rows columns"]:
            feature = i * tile.block + jnp.arange(tile.block)
            there = (feature < num_inputs)[None, :]
            x = plgpu.load(x_ref.at[row[:, None], feature[None, :]], mask=real[:, None] & there, other=0.0)
            kernel = plgpu.load(
                kernel_ref.at[group, column[:, None], feature[None, :]], mask=in_row[:, None] & there, other=0.0
            )
            contract_last = (((1,), (1,)), ((), ()))
            return total + lax.dot_general(
                x, kernel, contract_last, precision=precision, preferred_element_type=jnp.float32
            )

        total = lax.fori_loop(
            0, pl.cdiv(num_inputs, tile.block), step, jnp.zeros((tile.rows, tile.columns), jnp.float32)
        )
        # Rows of other groups aren't stored; past the last one, since the interpreter writes masked ones back.
        mine = jnp.where(real, place, out_ref.shape[0] + jnp.arange(tile.rows))
        plgpu.store(
            out_ref.at[mine[:, None], column[None, :]],
            total.astype(out_ref.dtype),
            mask=real[:, None] & in_row[None, :],
        )
