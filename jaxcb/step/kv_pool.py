"""The pool of KV pages: an array, or int8 values with their scales beside them; and pages as rows of one array.

Plain pages are one array [N, L, 2, page_size, K, D]; within its last three axes the native kernels may have an order of
their own (:data:`pallas_kernels.native.Order`). Pages of int8 are :class:`pallas_kernels.QuantizedPages`: such an
array and one of scales, float32 [N, L, 2, K, page_size]: D + 4 bytes a key or value of a head. What leaves the device
is one array in either case, so that nobody else has to know: of int8 pages rows of bytes, the values' and the scales'.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped

from pallas_kernels import QuantizedPages, gather_pages, scatter_pages

KVPages = Shaped[Array, "N L 2 page_size K D"] | QuantizedPages
PageRows = Shaped[Array, "M ..."]
"""Pages out of the pool: [M, L, 2, page_size, K, D], or uint8 [M, bytes of a page]."""
SCALE_BYTES = 4


def pool_of(shape: tuple[int, ...], dtype: Any, *, int8: bool) -> Any:
    """What a pool of pages of that shape, [N, L, 2, page_size, K, D], is made of, as ShapeDtypeStructs.

    Arguments:
        dtype: of plain pages.
        int8: the pages are int8 with scales instead.
    """
    if not int8:
        return jax.ShapeDtypeStruct(shape, dtype)
    *outer, page_size, num_kv_heads, _ = shape
    scales: Any = jax.ShapeDtypeStruct((*outer, num_kv_heads, page_size), jnp.float32)
    values: Any = jax.ShapeDtypeStruct(shape, jnp.int8)
    return QuantizedPages(values, scales)


def flat(kv: KVPages) -> Any:
    """The pool as the kernels see it, F = N * L * 2: [F, page_size, K, D]."""
    return jax.tree.map(lambda part: part.reshape(-1, *part.shape[3:]), kv)


def like(kv: KVPages, flat_pages: Any) -> KVPages:
    """What :func:`flat` gave, in the shape of the pool again."""
    return jax.tree.map(lambda part, whole: part.reshape(whole.shape), flat_pages, kv)


def gather_rows(kv: KVPages, pages: Int[Array, "M"]) -> PageRows:
    """Copies of some pages."""
    taken = gather_pages(kv, pages)
    if not isinstance(taken, QuantizedPages):
        return taken
    as_bytes = [lax.bitcast_convert_type(part, jnp.uint8).reshape(pages.shape[0], -1) for part in taken]
    return jnp.concatenate(as_bytes, 1)


def scatter_rows(kv: KVPages, pages: Int[Array, "M"], rows: PageRows) -> KVPages:
    """Overwrite some pages with what :func:`gather_rows` returned; page 0 is padding."""
    if not isinstance(kv, QuantizedPages):
        return scatter_pages(kv, pages, rows)
    values, scales = jnp.split(rows, [math.prod(kv.values.shape[1:])], 1)
    numbers = QuantizedPages(
        lax.bitcast_convert_type(values, jnp.int8).reshape(-1, *kv.values.shape[1:]),
        lax.bitcast_convert_type(scales.reshape(-1, *kv.scales.shape[1:], SCALE_BYTES), jnp.float32),
    )
    return scatter_pages(kv, pages, numbers)
