"""Ragged paged attention behind one function; the backends live in the folders beside this module."""

from __future__ import annotations

from jaxtyping import Array, Float, Shaped

from pallas_kernels.metadata import AttentionMetadata, Backend, default_backend
from pallas_kernels.xla import attention as xla


def ragged_paged_attention(
    q: Float[Array, "T H D"],
    kv_pages: Shaped[Array, "N*L*2 page_size K D"],
    metadata: AttentionMetadata,
    *,
    layer: int,
    num_layers: int,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    backend: Backend | None = None,
    interpret: bool = False,
) -> Float[Array, "T H D"]:
    """Attend from every token of a ragged batch to its sequence's KV positions up to itself."""
    backend = backend or default_backend()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return xla.attention(q, kv_pages, metadata, layer=layer, num_layers=num_layers, scale=scale, soft_cap=soft_cap)
