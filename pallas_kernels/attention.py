"""Ragged paged attention behind one function; the backends live in the folders beside this module."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from pallas_kernels import native
from pallas_kernels.checks import require, require_array, require_kv_pages
from pallas_kernels.metadata import AttentionMetadata, Backend, default_backend
from pallas_kernels.triton import ragged as triton
from pallas_kernels.triton.tiles import QueryTiles
from pallas_kernels.xla import ragged as xla
from pallas_kernels.xla.work import WorkLists

_BACKEND_OF = {WorkLists: "xla", QueryTiles: "triton", native.Tables: "native"}


def ragged_paged_attention(
    q: Float[Array, "T H D"],
    kv_pages: Shaped[Array, "F page_size K D"],
    metadata: AttentionMetadata,
    *,
    layer: int | Int32[Array, ""],
    num_layers: int,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    backend: Backend | None = None,
    interpret: bool = False,
) -> Float[Array, "T H D"]:
    """Attend from every token of a ragged batch to the positions of its sequence up to its own.

    Arguments:
        q: query heads, rotated; row order as in ``metadata.query_starts``.
        kv_pages: the pool [N, L, 2, page_size, K, D] seen flat, F = N*L*2. The keys of page p in layer l are flat page
            ``p*2*L + 2*l``, the values the one after it. They hold this step's keys and values already. dtype uint16
            is the bits of bfloat16 (xla and native).
        metadata: :func:`attention_metadata` of this step, built with the same window and backend.
        layer: l.
        num_layers: L.
        scale: factor of the scores; None: ``D ** -0.5``.
        window: positions that a query looks back on, itself included; None: all.
        soft_cap: scores become ``soft_cap * tanh(scores / soft_cap)``; None: they stay.
        backend: None chooses by platform.
        interpret: run the triton kernel in Pallas's interpreter, on any platform.

    Returns:
        Attention in q's dtype (products and softmax accumulate in float32); 0 for padding tokens.

    Raises:
        ValueError: a shape, dtype or number can't be; the message names the argument.
    """
    backend = backend or default_backend()
    require_kv_pages(kv_pages, layer=layer, num_layers=num_layers, backend=backend)
    _, page_size, num_kv_heads, head_dim = kv_pages.shape
    require_array(q, "q", (metadata.num_tokens, None, head_dim), dtypes=("float32", "bfloat16", "float16"))
    require(q.shape[1] % num_kv_heads == 0, "q", f"of a multiple of {num_kv_heads} heads", f"{q.shape[1]} heads")
    built_for = _BACKEND_OF[type(metadata.work)]
    require(built_for == backend, "metadata", f"built for backend {backend}", f"one for {built_for}")
    require(metadata.page_size == page_size, "metadata", f"built for pages of {page_size}", metadata.page_size)
    require(metadata.window == window, "metadata", f"built for window {window}", f"one for {metadata.window}")
    scale = head_dim**-0.5 if scale is None else scale
    if isinstance(metadata.work, native.Tables):
        require(native.loaded() is not None, "backend", "loaded first, by pallas_kernels.native.load", "native")
        return native.attention(
            q.astype(jnp.float32),
            kv_pages,
            metadata.work,
            layer=layer,
            num_layers=num_layers,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
        ).astype(q.dtype)
    if isinstance(metadata.work, WorkLists):
        return xla.ragged_paged_attention(
            q,
            kv_pages,
            metadata.work,
            layer=layer,
            num_layers=num_layers,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
        )
    return triton.ragged_paged_attention(
        q,
        kv_pages,
        metadata.work,
        layer=layer,
        num_layers=num_layers,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        interpret=interpret,
    )
