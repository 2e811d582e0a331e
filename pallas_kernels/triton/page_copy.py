"""Page copies inside the pool: a program for each pair of pages and run of bytes, with nothing in between."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int32, Shaped

RUN_BYTES = 8192
"""Bytes that a program copies: 16 a load of each of 128 threads, four loads in flight a thread."""


def copy_pages(
    pool: Shaped[Array, "N ..."], sources: Int32[Array, " M"], destinations: Int32[Array, " M"], *, interpret: bool
) -> Shaped[Array, "N ..."]:
    """:func:`pallas_kernels.copy_pages` of one array, arguments already checked."""
    rows = pool.reshape(pool.shape[0], -1)
    size = rows.shape[1]
    run = min(RUN_BYTES // pool.dtype.itemsize, pl.next_power_of_2(size))
    copied = pl.pallas_call(
        functools.partial(_kernel, run=run, size=size),
        grid=(sources.shape[0], pl.cdiv(size, run)),
        out_shape=jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        input_output_aliases={0: 0},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="copy_pages",
    )(rows, sources, destinations)
    return copied.reshape(pool.shape)


def _kernel(rows_ref, sources_ref, destinations_ref, out_ref, *, run: int, size: int) -> None:
    pair, place = pl.program_id(0), pl.program_id(1)
    source, destination = sources_ref[pair], destinations_ref[pair]

    @pl.when(source != destination)
    def _copy():
        column = place * run + jnp.arange(run)
        in_page = column < size
        plgpu.store(
            out_ref.at[destination, column],
            plgpu.load(rows_ref.at[source, column], mask=in_page, other=0),
            mask=in_page,
        )
