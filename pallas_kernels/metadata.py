"""What a step's attention needs besides q and the pages: built once a step inside jit, shared by every layer.

Letters: T tokens and S sequences of the bucket, P pages of a block table, H query heads, K KV heads, D head size,
L layers, N pages of the pool.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
from jaxtyping import Array, Int32

from pallas_kernels.xla.work import ChunkTiles, DecodeItems, chunk_tiles, decode_items

Backend = Literal["xla", "triton"]


def static() -> int:
    """A dataclass field that is part of the pytree's structure: two metadata that differ in it are different types."""
    return dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """One step's ragged batch, and the work it makes for the backend it was built for.

    Arguments:
        query_starts: token i of sequence s is row ``query_starts[s] + i`` of q; padding sequences hold no token.
        context_lens: KV positions of a sequence, this step's tokens included; 0 for padding sequences.
        block_tables: page numbers of a sequence, in the order of their positions.
        decodes: xla: work items of the sequences with one query token.
        chunks: xla: tiles of the sequences with more; None in a step of decodes only.
        backend: the backend that reads this metadata.
        window: positions a query may look back on, itself included; None: all. Layers that differ in it need one
            metadata each, because the work lists skip what lies before the window.
        page_size: tokens in a page.
        num_tokens: T.
    """

    query_starts: Int32[Array, "S+1"]
    context_lens: Int32[Array, " S"]
    block_tables: Int32[Array, "S P"]
    decodes: DecodeItems | None
    chunks: ChunkTiles | None
    backend: Backend = static()  # type: ignore[assignment]  # dataclasses.field
    window: int | None = static()
    page_size: int = static()
    num_tokens: int = static()


def default_backend() -> Backend:
    """The backend for the platform that jax runs on: triton on GPUs, xla elsewhere."""
    return "triton" if jax.default_backend() == "gpu" else "xla"


def attention_metadata(
    query_starts: Int32[Array, "S+1"],
    context_lens: Int32[Array, " S"],
    block_tables: Int32[Array, "S P"],
    *,
    num_tokens: int,
    page_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None = None,
    decode_only: bool = False,
    backend: Backend | None = None,
) -> AttentionMetadata:
    """Describe one step's batch for :func:`ragged_paged_attention`. Call it once a step, inside jit.

    Raises:
        ValueError: a shape, dtype or number can't be; the message names the argument.
    """
    backend = backend or default_backend()
    decodes = decode_items(
        query_starts, context_lens, block_tables, page_size=page_size, window=window, decode_only=decode_only
    )
    chunks = None
    if not decode_only:
        chunks = chunk_tiles(query_starts, num_tokens=num_tokens)
    return AttentionMetadata(
        query_starts=query_starts,
        context_lens=context_lens,
        block_tables=block_tables,
        decodes=decodes,
        chunks=chunks,
        backend=backend,
        window=window,
        page_size=page_size,
        num_tokens=num_tokens,
    )
