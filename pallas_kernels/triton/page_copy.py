"""Page moves in the pool, out of it and into it: a program for each page and run of bytes, with nothing in between."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
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
    kernel = functools.partial(_copy, size=rows.shape[1])
    copied = _call(kernel, "copy_pages", rows.shape, (rows, sources, destinations), donated=True, interpret=interpret)
    return copied.reshape(pool.shape)


def gather_pages(pool: Shaped[Array, "N ..."], pages: Int32[Array, " M"], *, interpret: bool) -> Shaped[Array, "M ..."]:
    """:func:`pallas_kernels.gather_pages` of one array, arguments already checked."""
    rows = pool.reshape(pool.shape[0], -1)
    shape = (pages.shape[0], rows.shape[1])
    kernel = functools.partial(_gather, size=rows.shape[1])
    taken = _call(kernel, "gather_pages", shape, (rows, pages), donated=False, interpret=interpret)
    return taken.reshape(-1, *pool.shape[1:])


def scatter_pages(
    pool: Shaped[Array, "N ..."], pages: Int32[Array, " M"], new: Shaped[Array, "M ..."], *, interpret: bool
) -> Shaped[Array, "N ..."]:
    """:func:`pallas_kernels.scatter_pages` of one array, arguments already checked."""
    rows = pool.reshape(pool.shape[0], -1)
    new = jnp.asarray(new).reshape(new.shape[0], -1)
    kernel = functools.partial(_scatter, size=rows.shape[1])
    written = _call(kernel, "scatter_pages", rows.shape, (rows, pages, new), donated=True, interpret=interpret)
    return written.reshape(pool.shape)


def _call(
    kernel: Any, name: str, shape: tuple[int, ...], operands: tuple[Any, ...], *, donated: bool, interpret: bool
) -> Array:
    """A program for each page that moves and run of its elements. ``donated``: the first operand is the result."""
    dtype, operands = operands[0].dtype, tuple(_bits(each) for each in operands)
    rows, pages = operands[:2]
    size = rows.shape[1]
    run = min(RUN_BYTES // rows.dtype.itemsize, pl.next_power_of_2(size))
    moved = pl.pallas_call(
        functools.partial(kernel, run=run),
        grid=(pages.shape[0], pl.cdiv(size, run)),
        out_shape=jax.ShapeDtypeStruct(shape, rows.dtype),
        input_output_aliases={0: 0} if donated else {},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name=name,
    )(*operands)
    return moved if moved.dtype == dtype else lax.bitcast_convert_type(moved, dtype)


def _bits(array: Array) -> Array:
    """Pages of float8 as integers: not every GPU has such numbers, and Triton makes no zeros of them to fill loads."""
    is_float8 = array.dtype.itemsize == 1 and jnp.issubdtype(array.dtype, jnp.floating)
    return lax.bitcast_convert_type(array, jnp.uint8) if is_float8 else array


def _copy(rows_ref: Any, sources_ref: Any, destinations_ref: Any, out_ref: Any, *, size: int, run: int) -> None:
    pair = pl.program_id(0)
    source, destination, place = sources_ref[pair], destinations_ref[pair], pl.program_id(1)

    @pl.when(source != destination)
    def _move_one() -> None:
        _move(rows_ref, source, out_ref, destination, place, size, run)


def _gather(rows_ref: Any, pages_ref: Any, out_ref: Any, *, size: int, run: int) -> None:
    number = pl.program_id(0)
    _move(rows_ref, pages_ref[number], out_ref, number, pl.program_id(1), size, run)


def _scatter(_: Any, pages_ref: Any, new_ref: Any, out_ref: Any, *, size: int, run: int) -> None:
    number, place = pl.program_id(0), pl.program_id(1)
    page = pages_ref[number]

    @pl.when(page != 0)  # padding
    def _move_one() -> None:
        _move(new_ref, number, out_ref, page, place, size, run)


def _move(source_ref: Any, source: Any, out_ref: Any, destination: Any, place: Any, size: int, run: int) -> None:
    column = place * run + jnp.arange(run)
    in_page = column < size
    elements = plgpu.load(source_ref.at[source, column], mask=in_page, other=0)
    plgpu.store(out_ref.at[destination, column], elements, mask=in_page)
