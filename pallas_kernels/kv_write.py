"""Writing a step's keys and values into their pages."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Shaped

from pallas_kernels.checks import require_array, require_kv_pages
from pallas_kernels.metadata import Backend, default_backend


def write_kv(
    kv_pages: Shaped[Array, "F page_size K D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    pages: Int32[Array, " T"],
    offsets: Int32[Array, " T"],
    *,
    layer: int | Int32[Array, ""],
    num_layers: int,
    backend: Backend | None = None,
) -> Shaped[Array, "F page_size K D"]:
    """Put row t of k and v at position ``offsets[t]`` of page ``pages[t]``, in place if ``kv_pages`` is donated.

    One scatter writes both: it is the same XLA operation on every backend, and none of them copies the pool.

    Arguments:
        kv_pages: the pool [N, L, 2, page_size, K, D] seen flat, F = N*L*2. dtype uint16 stores the bits of bfloat16.
        k: keys, rotated.
        v: values.
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
    require_kv_pages(kv_pages, layer=layer, num_layers=num_layers, backend=backend or default_backend())
    require_array(k, "k", (None, *kv_pages.shape[2:]), dtypes=("float32", "bfloat16", "float16"))
    require_array(v, "v", k.shape, dtypes=("float32", "bfloat16", "float16"))
    require_array(pages, "pages", k.shape[:1], dtypes=("int32",))
    require_array(offsets, "offsets", k.shape[:1], dtypes=("int32",))
    rows = jnp.stack([k, v], 1)
    if kv_pages.dtype == jnp.uint16:
        rows = lax.bitcast_convert_type(rows.astype(jnp.bfloat16), jnp.uint16)
    keys = pages * (2 * num_layers) + 2 * layer
    flat_pages = jnp.stack([keys, keys + 1], 1)
    return kv_pages.at[flat_pages, offsets[:, None]].set(rows.astype(kv_pages.dtype), mode="drop")
