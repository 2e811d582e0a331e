"""What pages may hold: plain numbers, or 8-bit ones with a scale for every token and KV head.

A quantised pool is two arrays beside each other, values [N, L, 2, page_size, K, D] and scales [N, L, 2, K, page_size]
in float32: a key or value is ``values * scales``. A page of both is a contiguous run, as in a plain pool, and the
positions of a head lie side by side in the scales, because a kernel loads a block of them for one head.
Scales cost 4 bytes in D + 4; a scale a token keeps a row writable on its own, and a scale a head keeps one head's
outliers from flattening the others.
"""

from __future__ import annotations

import numbers
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Float32, Shaped

from pallas_kernels.checks import require, require_array, require_integer, require_page_size

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""The quantised dtypes, and what the largest feature of a row becomes in each."""
PLAIN_DTYPES = ("float32", "bfloat16", "float16")
BITS = {"uint16": "bfloat16", "uint8": "float8_e4m3fn"}
"""Page dtypes that hold the bits of another (xla and native only). XLA's CPU scatter into bfloat16 and float8 converts
the whole array to float32 and back; into integers it writes the rows alone."""


class QuantizedPages(NamedTuple):
    """Pages of 8-bit keys and values, seen flat as every function takes them.

    Arguments:
        values: int8 or float8_e4m3fn; uint8 holds the bits of float8_e4m3fn (xla only).
        scales: what a row of a head is multiplied by.
    """

    values: Shaped[Array, "F page_size K D"]
    scales: Float32[Array, "F K page_size"]


KVPages = Shaped[Array, "F page_size K D"] | QuantizedPages
"""The flat view of a pool."""


def values_of(kv_pages: KVPages) -> Shaped[Array, "F page_size K D"]:
    """The keys and values themselves, whether quantised or not."""
    return kv_pages.values if isinstance(kv_pages, QuantizedPages) else kv_pages


def stored_dtype(kv_pages: KVPages) -> jnp.dtype:
    """The dtype of the numbers in the pages, also where their bits are stored as integers."""
    name = jnp.dtype(values_of(kv_pages).dtype).name
    return jnp.dtype(BITS.get(name, name))


def from_bits(taken: Shaped[Array, "..."], stored: jnp.dtype) -> Shaped[Array, "..."]:
    """What was read from pages, as numbers."""
    return taken if taken.dtype == stored else lax.bitcast_convert_type(taken, stored)


def to_bits(rows: Shaped[Array, "..."], pages_dtype: DTypeLike) -> Shaped[Array, "..."]:
    """Numbers of the stored dtype, as the pages keep them."""
    return rows if rows.dtype == pages_dtype else lax.bitcast_convert_type(rows, pages_dtype)


def quantize_rows(
    rows: Float[Array, "... D"], dtype: DTypeLike
) -> tuple[Shaped[Array, "... D"], Float32[Array, "..."]]:
    """Rows in an 8-bit dtype and their scales: the largest magnitude of a row becomes the dtype's largest number."""
    rows = rows.astype(jnp.float32)
    largest = jnp.abs(rows).max(-1)
    scales = jnp.where(largest == 0, 1.0, largest / LARGEST[jnp.dtype(dtype).name])
    scaled = rows / scales[..., None]
    return (jnp.round(scaled) if dtype == jnp.int8 else scaled).astype(dtype), scales


def require_kv_pages(kv_pages: KVPages, *, layer: object, num_layers: int, backend: str) -> None:
    """Raise ValueError unless ``kv_pages`` is the flat view [N*L*2, page_size, K, D] of a pool of ``num_layers``."""
    quantized, values = isinstance(kv_pages, QuantizedPages), values_of(kv_pages)
    name = "kv_pages.values" if quantized else "kv_pages"
    dtypes: tuple[str, ...] = tuple(LARGEST) if quantized else PLAIN_DTYPES
    if quantized and backend == "native":
        dtypes = ("int8",)
    if backend not in ("triton", "mosaic"):
        dtypes += tuple(bits for bits, stored in BITS.items() if stored in dtypes)
    require_array(values, name, (None, None, None, None), dtypes=dtypes)
    require_page_size(values.shape[1])
    if isinstance(kv_pages, QuantizedPages):
        num_pages, page_size, num_kv_heads, _ = values.shape
        require_array(kv_pages.scales, "kv_pages.scales", (num_pages, num_kv_heads, page_size), dtypes=("float32",))
    require_integer(num_layers, "num_layers")
    require(
        values.shape[0] % (2 * num_layers) == 0,
        name,
        f"of a multiple of 2 * num_layers = {2 * num_layers} flat pages",
        f"{values.shape[0]} flat pages",
    )
    if isinstance(layer, numbers.Integral):
        require(not isinstance(layer, bool) and 0 <= int(layer) < num_layers, "layer", f"in [0, {num_layers})", layer)
    else:
        require_array(jnp.asarray(layer), "layer", (), dtypes=("int32",))
