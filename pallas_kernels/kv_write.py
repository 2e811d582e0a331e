"""Write a step's keys and values into their pages."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Shaped

from pallas_kernels.metadata import Backend


def write_kv(
    kv_pages: Shaped[Array, "N*L*2 page_size K D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    pages: Int32[Array, " T"],
    offsets: Int32[Array, " T"],
    *,
    layer: int,
    num_layers: int,
    backend: Backend | None = None,
) -> Shaped[Array, "N*L*2 page_size K D"]:
    """Put row t of k and v at ``offsets[t]`` of page ``pages[t]`` in one scatter; in place if kv_pages is donated."""
    rows = jnp.stack([k, v], 1)
    if kv_pages.dtype == jnp.uint16:
        rows = lax.bitcast_convert_type(rows.astype(jnp.bfloat16), jnp.uint16)
    first = pages * (2 * num_layers) + 2 * layer
    flat_pages = jnp.stack([first, first + 1], 1)
    return kv_pages.at[flat_pages, offsets[:, None]].set(rows.astype(kv_pages.dtype), mode="drop")
