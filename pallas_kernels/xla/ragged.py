"""The xla backend's ragged paged attention: chunks and decodes, each over its work list."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from pallas_kernels.metadata import AttentionMetadata
from pallas_kernels.xla.blocks import LayerKV
from pallas_kernels.xla.chunks import attend_chunks
from pallas_kernels.xla.decode import attend_decodes


def ragged_paged_attention(
    q: Float[Array, "T H D"],
    kv_pages: Shaped[Array, "F page_size K D"],
    metadata: AttentionMetadata,
    *,
    layer: int | Int32[Array, ""],
    num_layers: int,
    scale: float,
    soft_cap: float | None,
) -> Float[Array, "T H D"]:
    """:func:`pallas_kernels.ragged_paged_attention`, arguments already checked."""
    stored = jnp.bfloat16 if kv_pages.dtype == jnp.uint16 else kv_pages.dtype
    dtype = jnp.promote_types(q.dtype, stored)
    kv = LayerKV(pages=kv_pages, layer=layer, num_layers=num_layers, dtype=dtype)
    scaled = (q.astype(jnp.float32) * scale).astype(dtype)
    work = metadata.work
    if work.chunks is None:
        return attend_decodes(scaled, kv, work, soft_cap=soft_cap).astype(q.dtype)
    out = attend_chunks(scaled, kv, metadata, work.chunks, soft_cap=soft_cap)
    token = metadata.query_starts[:-1]
    decoded = attend_decodes(scaled.at[token].get(mode="clip"), kv, work, soft_cap=soft_cap)
    token = jnp.where(work.decodes.is_decode, token, q.shape[0])  # out of bounds: dropped
    return out.at[token].set(decoded, mode="drop").astype(q.dtype)
