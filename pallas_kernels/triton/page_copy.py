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

from pallas_kernels.triton.offsets import require_offsets_fit

RUN_BYTES = 8192
"""Bytes that a program copies: 16 a load of each of 128 threads, four loads in flight a thread."""


def copy_pages(
    pool: Shaped[Array, "N ..."], sources: Int32[Array, " M"], destinations: Int32[Array, " M"], *, interpret: bool
) -> Shaped[Array, "N ..."]:
    """:func:`pallas_kernels.copy_pages` of one array, arguments already checked."""
    operands = (_words(pool), sources, destinations)
    copied = _call(_copy, "copy_pages", pool.shape[0], operands, donated=True, interpret=interpret)
    return _numbers(copied, pool)


def gather_pages(pool: Shaped[Array, "N ..."], pages: Int32[Array, " M"], *, interpret: bool) -> Shaped[Array, "M ..."]:
    """:func:`pallas_kernels.gather_pages` of one array, arguments already checked."""
    taken = _call(_gather, "gather_pages", pages.shape[0], (_words(pool), pages), donated=False, interpret=interpret)
    return _numbers(taken, pool)


def scatter_pages(
    pool: Shaped[Array, "N ..."], pages: Int32[Array, " M"], new: Shaped[Array, "M ..."], *, interpret: bool
) -> Shaped[Array, "N ..."]:
    """:func:`pallas_kernels.scatter_pages` of one array, arguments already checked."""
    operands = (_words(pool), pages, _words(new))
    written = _call(_scatter, "scatter_pages", pool.shape[0], operands, donated=True, interpret=interpret)
    return _numbers(written, pool)


def _call(
    kernel: Any, name: str, num_rows: int, operands: tuple[Any, ...], *, donated: bool, interpret: bool
) -> Shaped[Array, "num_rows words"]:
    """A program for each page that moves and run of its words. ``donated``: the first operand is the result."""
    rows, pages = operands[:2]
    require_offsets_fit(rows, "kv")
    size = rows.shape[1]
    run = min(RUN_BYTES // rows.dtype.itemsize, pl.next_power_of_2(size))
    return pl.pallas_call(
        functools.partial(kernel, size=size, run=run),
        grid=(pages.shape[0], pl.cdiv(size, run)),
        out_shape=jax.ShapeDtypeStruct((num_rows, size), rows.dtype),
        input_output_aliases={0: 0} if donated else {},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name=name,
    )(*operands)


def _words(pool: Shaped[Array, "N ..."]) -> Shaped[Array, "N words"]:
    """Each page in words of 4 bytes, if it is whole words: XLA takes that for the same array.

    Offsets of words reach through the 4 GiB for which Pallas gives them 32 bits, those of bytes through half of it.
    Float8 that makes no whole words goes as integers: not every GPU has such numbers, and Triton makes no zeros of them
    to fill loads.
    """
    rows = jnp.asarray(pool).reshape(pool.shape[0], -1)
    itemsize = rows.dtype.itemsize
    if itemsize < 4 and rows.shape[1] * itemsize % 4 == 0:
        return lax.bitcast_convert_type(rows.reshape(rows.shape[0], -1, 4 // itemsize), jnp.uint32)
    is_float8 = itemsize == 1 and jnp.issubdtype(rows.dtype, jnp.floating)
    return lax.bitcast_convert_type(rows, jnp.uint8) if is_float8 else rows


def _numbers(words: Shaped[Array, "M words"], pool: Shaped[Array, "N ..."]) -> Shaped[Array, "M ..."]:
    """Pages of the pool's kind again."""
    numbers = words if words.dtype == pool.dtype else lax.bitcast_convert_type(words, pool.dtype)
    return numbers.reshape(-1, *pool.shape[1:])


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
