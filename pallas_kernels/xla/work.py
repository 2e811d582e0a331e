"""Work lists of the xla backend: what there is to attend to, as flat lists that loops of dynamic length walk.

Five tokens: sequence 0 decodes at context 300, sequence 1 prefills the last four tokens of its 20.

    query_starts   0 1 5
    context_lens   300 20
    decode items   (sequence, block): (0, 0) (0, 1) (0, 2)      44 positions of the last block are real
    chunk tiles    (sequence, first token in the chunk): (1, 0)
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

BLOCK = 128
"""KV positions that one product covers: a multiple of every page size. Measured against 64 and 256: half of a shorter
block is loop overhead, half of a longer one is padding of short contexts."""
CHUNK_ROWS = 64
"""Most query tokens in a chunk tile. 128 is a tenth faster on one long prompt and half as fast on prompts of 50."""
MAX_GROUP = 8
"""Most decode items that one iteration takes."""


class DecodeItems(NamedTuple):
    """Blocks of the sequences that have one query token, sequence after sequence; M entries, ``count`` of them real.

    An entry past ``count`` holds no position and has a rank of its own, S.

    Arguments:
        sequence: whose block it is.
        block: row of ``WorkLists.pages``.
        rank: the place of the sequence among those that have items. Neighbours differ by at most one, so a group of
            items touches as many neighbouring ranks at most.
        begin: first position of the block inside the window.
        end: first position of the block past the context.
        count: real entries.
        rank_of: rank of each sequence; of no use for those without items.
        is_decode: which sequences have items.
    """

    sequence: Int32[Array, " M"]
    block: Int32[Array, " M"]
    rank: Int32[Array, " M"]
    begin: Int32[Array, " M"]
    end: Int32[Array, " M"]
    count: Int32[Array, ""]
    rank_of: Int32[Array, " S"]
    is_decode: Bool[Array, " S"]


class ChunkTiles(NamedTuple):
    """Tiles of query tokens of the sequences that have more than one; M entries, ``count`` of them real.

    Arguments:
        sequence: whose tokens they are.
        first: the tile's first token, counted inside the sequence's chunk.
        count: real entries.
    """

    sequence: Int32[Array, " M"]
    first: Int32[Array, " M"]
    count: Int32[Array, ""]


class WorkLists(NamedTuple):
    """Everything the xla backend does in a step.

    Arguments:
        pages: the block tables cut into blocks: row ``s * blocks + b`` holds the pages of block b of sequence s.
        decodes: work of the sequences with one token.
        chunks: work of the others; None in a step of decodes alone.
    """

    pages: Int32[Array, "S_times_blocks pages_per_block"]
    decodes: DecodeItems
    chunks: ChunkTiles | None


def chunk_rows(num_tokens: int) -> int:
    """Query tokens in a chunk tile of a bucket of ``num_tokens``."""
    return min(CHUNK_ROWS, num_tokens)


def work_lists(
    query_starts: Int32[Array, " S_plus_1"],
    context_lens: Int32[Array, " S"],
    block_tables: Int32[Array, "S P"],
    *,
    num_tokens: int,
    page_size: int,
    window: int | None,
    decode_only: bool,
) -> WorkLists:
    """Cut a step into decode items and chunk tiles."""
    query_lens = query_starts[1:] - query_starts[:-1]
    per_block = BLOCK // page_size
    pages = jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % per_block))).reshape(-1, per_block)
    is_decode = context_lens > 0 if decode_only else query_lens == 1
    return WorkLists(
        pages=pages,
        decodes=_decode_items(is_decode, context_lens, pages.shape[0] // context_lens.shape[0], window),
        chunks=None if decode_only else _chunk_tiles(query_lens, num_tokens),
    )


def _decode_items(
    is_decode: Bool[Array, " S"], context_lens: Int32[Array, " S"], blocks: int, window: int | None
) -> DecodeItems:
    num_seqs = context_lens.shape[0]
    oldest = jnp.zeros_like(context_lens) if window is None else jnp.maximum(context_lens - window, 0)
    counts = jnp.where(is_decode, -(-context_lens // BLOCK) - oldest // BLOCK, 0)
    sequence, number, real = _enumerate(counts, num_seqs * blocks + MAX_GROUP)
    block = oldest[sequence] // BLOCK + number
    rank_of = jnp.cumsum(counts > 0, dtype=jnp.int32) - 1
    return DecodeItems(
        sequence=sequence,
        block=jnp.where(real, sequence * blocks + block, 0),
        rank=jnp.where(real, rank_of[sequence], num_seqs),
        begin=oldest[sequence] - block * BLOCK,
        end=jnp.where(real, context_lens[sequence] - block * BLOCK, 0),
        count=jnp.sum(counts),
        rank_of=rank_of,
        is_decode=is_decode,
    )


def _chunk_tiles(query_lens: Int32[Array, " S"], num_tokens: int) -> ChunkTiles:
    rows = chunk_rows(num_tokens)
    counts = jnp.where(query_lens > 1, -(-query_lens // rows), 0)
    sequence, number, _ = _enumerate(counts, num_tokens // rows + query_lens.shape[0])
    return ChunkTiles(sequence=sequence, first=number * rows, count=jnp.sum(counts))


def _enumerate(
    counts: Int32[Array, " S"], size: int
) -> tuple[Int32[Array, " size"], Int32[Array, " size"], Bool[Array, " size"]]:
    """List ``counts[s]`` things of each s: owner, number inside the owner, and whether the entry is real.

    counts 2 0 1, size 4  ->  owner 0 0 2 2, number 0 1 0 1, real 1 1 1 0
    """
    ends = jnp.cumsum(counts)
    entry = jnp.arange(size, dtype=jnp.int32)
    owner = jnp.searchsorted(ends, entry, side="right", method="scan_unrolled").astype(jnp.int32)
    owner = jnp.minimum(owner, counts.shape[0] - 1)
    return owner, entry - (ends - counts)[owner], entry < ends[-1]
