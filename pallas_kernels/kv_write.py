"""Writing a step's keys and values into their pages."""

from __future__ import annotations

from typing import TypeVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from pallas_kernels.checks import require_array
from pallas_kernels.metadata import Backend, chosen_backend
from pallas_kernels.pages import (
    PLAIN_DTYPES,
    QuantizedPages,
    quantize_rows,
    require_kv_pages,
    stored_dtype,
    to_bits,
    values_of,
)

Pages = TypeVar("Pages", Array, QuantizedPages)


def write_kv(
    kv_pages: Pages,
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    pages: Int32[Array, " T"],
    offsets: Int32[Array, " T"],
    *,
    layer: int | Int32[Array, ""],
    num_layers: int,
    backend: Backend | None = None,
) -> Pages:
    """Put row t of k and v at position ``offsets[t]`` of page ``pages[t]``, in place if ``kv_pages`` is donated.

    One scatter writes both (and one their scales, into quantised pages): it is the same XLA operation on every backend,
    and none of them copies the pool.

    Arguments:
        kv_pages: the pool [N, L, 2, page_size, K, D] seen flat, F = N*L*2. dtype uint16 stores the bits of bfloat16.
            Into :class:`QuantizedPages` rows are written with the scale of each token and head.
        k: keys, rotated.
        v: values, of k's dtype.
        pages: page number of each token. Padding tokens go to page 0, which nobody reads.
        offsets: position inside the page.
        layer: l.
        num_layers: L.
        backend: the backend that will read the pages; None chooses by platform.

    Returns:
        The pages with the rows written.

    Raises:
        ValueError: a shape, dtype or number can't be; the message names the argument.
    """
    backend = chosen_backend(backend)
    require_kv_pages(kv_pages, layer=layer, num_layers=num_layers, backend=backend)
    values: Array = values_of(kv_pages)
    require_array(k, "k", (None, *values.shape[2:]), dtypes=PLAIN_DTYPES)
    require_array(v, "v", k.shape, dtypes=(jnp.dtype(k.dtype).name,))
    require_array(pages, "pages", k.shape[:1], dtypes=("int32",))
    require_array(offsets, "offsets", k.shape[:1], dtypes=("int32",))
    values, pages = jnp.asarray(values), jnp.asarray(pages)
    rows = jnp.stack([k, v], 1)
    keys = pages * (2 * num_layers) + 2 * layer
    flat_pages = jnp.stack([keys, keys + 1], 1)
    if not isinstance(kv_pages, QuantizedPages):
        return _put(values, flat_pages, offsets, rows.astype(stored_dtype(kv_pages)))
    rows, scales = quantize_rows(rows, stored_dtype(kv_pages))
    heads = jnp.arange(values.shape[2], dtype=jnp.int32)
    at_scales = jnp.asarray(kv_pages.scales).at[flat_pages[..., None], heads, offsets[:, None, None]]
    return QuantizedPages(_put(values, flat_pages, offsets, rows), at_scales.set(scales, mode="drop"))


def _put(
    values: Shaped[Array, "F page_size K D"],
    flat_pages: Int32[Array, "T 2"],
    offsets: Int32[Array, " T"],
    rows: Shaped[Array, "T 2 K D"],
) -> Shaped[Array, "F page_size K D"]:
    return values.at[flat_pages, offsets[:, None]].set(to_bits(rows, values.dtype), mode="drop")
