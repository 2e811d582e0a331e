"""The xla backend's ragged paged attention: chunks and decodes, each over its work list."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.pages import KVPages, QuantizedPages, stored_dtype
from pallas_kernels.xla.blocks import LayerKV
from pallas_kernels.xla.chunks import attend_chunks
from pallas_kernels.xla.decode import attend_decodes
from pallas_kernels.xla.work import WorkLists


def ragged_paged_attention(
    q: Float[Array, "T H D"],
    kv_pages: KVPages,
    work: WorkLists,
    *,
    layer: int | Int32[Array, ""],
    num_layers: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " H"] | None,
) -> Float[Array, "T H D"]:
    """:func:`pallas_kernels.ragged_paged_attention`, arguments already checked."""
    # 8-bit numbers are exact in bfloat16: scaled, they take the dtype of the queries.
    dtype = q.dtype if isinstance(kv_pages, QuantizedPages) else jnp.promote_types(q.dtype, stored_dtype(kv_pages))
    kv = LayerKV(pages=kv_pages, layer=layer, num_layers=num_layers, dtype=dtype)
    scaled = (q.astype(jnp.float32) * scale).astype(dtype)
    options: dict[str, Any] = {"soft_cap": soft_cap, "sinks": sinks}
    if work.chunks is None:
        assert work.decodes is not None  # a step has one of the two at least
        decoded = attend_decodes(scaled, kv, work, work.decodes, **options)
        return jnp.where((work.decodes.token_of < q.shape[0])[:, None, None], decoded, 0).astype(q.dtype)
    out = attend_chunks(scaled, kv, work, work.chunks, window=window, **options)
    if work.decodes is not None:
        token = work.decodes.token_of
        decoded = attend_decodes(scaled.at[token].get(mode="clip"), kv, work, work.decodes, **options)
        out = out.at[token].set(decoded, mode="drop")
    return out.astype(q.dtype)
