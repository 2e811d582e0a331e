"""Ragged paged attention behind one function; the backends live in the folders beside this module."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels import native
from pallas_kernels.checks import require, require_array, require_number, require_window
from pallas_kernels.metadata import AttentionMetadata, Backend, chosen_backend
from pallas_kernels.norms import RawQueries, require_raw_queries
from pallas_kernels.pages import PLAIN_DTYPES, KVPages, require_kv_pages, values_of
from pallas_kernels.triton import ragged as triton
from pallas_kernels.triton.work import TritonWork
from pallas_kernels.xla import ragged as xla
from pallas_kernels.xla.work import WorkLists


def ragged_paged_attention(
    q: Float[Array, "T H D"] | RawQueries,
    kv_pages: KVPages,
    metadata: AttentionMetadata,
    *,
    layer: int | Int32[Array, ""],
    num_layers: int,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    arrivals: Int32[Array, "T K"] | None = None,
    backend: Backend | None = None,
    interpret: bool | Any = False,
) -> Float[Array, "T H D"]:
    """Attend from every token of a ragged batch to the positions of its sequence up to its own.

    Arguments:
        q: query heads, rotated; row order as in ``metadata.query_starts``. The triton backend also takes
            :class:`RawQueries`, in a step of decodes alone.
        kv_pages: the pool [N, L, 2, page_size, K, D] seen flat, F = N*L*2. The keys of page p in layer l are flat page
            ``p*2*L + 2*l``, the values the one after it. They hold this step's keys and values already. dtype uint16
            is the bits of bfloat16 (xla and native); :class:`QuantizedPages` are scaled as they are read.
        metadata: :func:`attention_metadata` of this step, built for these heads and pages, with the same window and
            backend.
        layer: l.
        num_layers: L.
        scale: factor of the scores, finite; None: ``D ** -0.5``.
        window: positions that a query looks back on, itself included; None: all.
        soft_cap: scores become ``soft_cap * tanh(scores / soft_cap)``, it is above 0; None: they stay.
        sinks: a score of each head that takes its share of the weights and adds no value (Xiao et al. 2023, section
            3.3, as gpt-oss trains them); None: none.
        arrivals: zeros that the triton kernel of decodes counts in, as :func:`pallas_kernels.rope_and_write_kv` returns
            them; None: it makes some, with one kernel more. Others have nothing to count.
        backend: None chooses by platform.
        interpret: run the GPU kernels in Pallas's interpreter, on any platform; for mosaic also InterpretGPUParams.

    Returns:
        Attention in q's dtype (products and softmax accumulate in float32); 0 for padding tokens.

    Raises:
        ValueError: a shape, dtype or number can't be; the message names the argument.
    """
    backend = chosen_backend(backend)
    require_kv_pages(kv_pages, layer=layer, num_layers=num_layers, backend=backend)
    require_window(window)
    _require_queries(q, kv_pages, metadata, backend=backend, window=window)
    kv_pages = jax.tree.map(jnp.asarray, kv_pages)
    num_kv_heads, head_dim = values_of(kv_pages).shape[2:]
    if scale is not None:
        require_number(scale, "scale")
    if soft_cap is not None:
        require_number(soft_cap, "soft_cap", above=0)
    if sinks is not None:
        require_array(sinks, "sinks", (q.shape[1],), dtypes=PLAIN_DTYPES)
        sinks = sinks.astype(jnp.float32)
    work = metadata.work
    if arrivals is not None:
        counts = isinstance(work, TritonWork) and work.splits is not None
        require(counts, "arrivals", "None where no kernel counts: another backend than triton, or one_path", "an array")
        require_array(arrivals, "arrivals", (metadata.num_tokens, num_kv_heads), dtypes=("int32",))
    options: dict[str, Any] = {
        "layer": layer,
        "num_layers": num_layers,
        "scale": head_dim**-0.5 if scale is None else scale,
        "window": window,
        "soft_cap": soft_cap,
    }
    if isinstance(q, RawQueries):
        whole = isinstance(work, TritonWork) and metadata.decode_only and work.splits is not None
        require(whole, "q", "an array, but for decodes alone on backend triton", "RawQueries")
        assert isinstance(work, TritonWork) and work.splits is not None
        return triton.attend_single_tokens(
            q, kv_pages, work, work.splits, sinks=sinks, arrivals=arrivals, interpret=interpret, **options
        )
    q = jnp.asarray(q)
    if isinstance(work, native.Tables):
        require(native.loaded() is not None, "backend", "loaded first, by pallas_kernels.native.load", "native")
        attended = native.attention(q.astype(jnp.float32), kv_pages, work, sinks=sinks, **options)
        return attended.astype(q.dtype)
    if isinstance(work, WorkLists):
        return xla.ragged_paged_attention(q, kv_pages, work, sinks=sinks, **options)
    if backend == "mosaic":
        from pallas_kernels.mosaic import ragged as mosaic  # a third of this package's import time

        mosaic.require_supported(q, kv_pages, sinks)
        return mosaic.ragged_paged_attention(q, kv_pages, work, arrivals=arrivals, interpret=interpret, **options)
    return triton.ragged_paged_attention(
        q, kv_pages, work, sinks=sinks, arrivals=arrivals, interpret=interpret, **options
    )


def decode_attention(
    q: Float[Array, "S H D"] | RawQueries,
    kv_pages: KVPages,
    metadata: AttentionMetadata,
    *,
    layer: int | Int32[Array, ""],
    num_layers: int,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    arrivals: Int32[Array, "S K"] | None = None,
    backend: Backend | None = None,
    interpret: bool | Any = False,
) -> Float[Array, "S H D"]:
    """:func:`ragged_paged_attention` of a step of decodes alone: one query a sequence, S of them.

    Each context is cut into splits that run side by side, as many as its own length asks for. Arguments as there.

    Raises:
        ValueError: the metadata was not built with ``decode_only=True``, or an argument can't be.
    """
    require(metadata.decode_only, "metadata", "built with decode_only=True", "one for chunks too")
    return ragged_paged_attention(
        q,
        kv_pages,
        metadata,
        layer=layer,
        num_layers=num_layers,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        arrivals=arrivals,
        backend=backend,
        interpret=interpret,
    )


def _require_queries(
    q: Float[Array, "T H D"] | RawQueries,
    kv_pages: KVPages,
    metadata: AttentionMetadata,
    *,
    backend: Backend,
    window: int | None,
) -> None:
    """Raise ValueError unless queries, pages and metadata are of one batch and one kind of layer."""
    _, page_size, num_kv_heads, head_dim = values_of(kv_pages).shape
    rows = q.qkv if isinstance(q, RawQueries) else q
    require_array(rows, "q", (metadata.num_tokens, None, head_dim), dtypes=PLAIN_DTYPES)
    if isinstance(q, RawQueries):
        require_raw_queries(q)
    require(q.shape[1] % num_kv_heads == 0, "q", f"of a multiple of {num_kv_heads} heads", f"{q.shape[1]} heads")
    for what, given, built_for in (
        ("backend", backend, metadata.backend),
        ("num_heads", q.shape[1], metadata.num_heads),
        ("num_kv_heads", num_kv_heads, metadata.num_kv_heads),
        ("head_dim", head_dim, metadata.head_dim),
        ("page_size", page_size, metadata.page_size),
        ("window", window, metadata.window),
    ):
        require(given == built_for, "metadata", f"built for {what} {given}", f"one for {built_for}")
