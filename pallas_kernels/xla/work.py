"""Work lists of the xla backend: what there is to attend to, as flat lists that loops of dynamic length walk.

Five tokens: sequence 0 decodes at context 300, sequence 1 prefills the last four tokens of its 20.

    query_starts   0 1 5
    context_lens   300 20
    decode items   (sequence, block): (0, 0) (0, 1) (0, 2)      44 positions of the last block are real
    chunk tiles    (sequence, start, end, context): (1, 1, 5, 20)
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
ONE_PATH_ROWS = 8
"""The same where single tokens fill tiles of their own: most of such a tile is padding."""
MAX_GROUP = 8
"""Most decode items that one iteration takes."""


class DecodeItems(NamedTuple):
    """Blocks of the sequences that have one query token, sequence after sequence.

    M entries, ``num_items`` of them real; one that isn't holds no position and has a rank of its own, S.

    Arguments:
        sequence: whose block it is.
        block: row of ``WorkLists.pages``.
        rank: the place of the sequence among those that have items. Neighbours differ by at most one, so a group of
            items touches as many neighbouring ranks at most.
        begin: first position of the block inside the window.
        end: first position of the block past the context.
        num_items: real entries.
        rank_of: rank of each sequence; of no use for those without items.
        token_of: query token of each sequence; T for those without items.
    """

    sequence: Int32[Array, " M"]
    block: Int32[Array, " M"]
    rank: Int32[Array, " M"]
    begin: Int32[Array, " M"]
    end: Int32[Array, " M"]
    num_items: Int32[Array, ""]
    rank_of: Int32[Array, " S"]
    token_of: Int32[Array, " S"]


class ChunkTiles(NamedTuple):
    """Tiles of query tokens of the sequences that have more than one; M entries, ``num_tiles`` of them real.

    Arguments:
        sequence: whose tokens they are.
        start: row of q that holds the tile's first token.
        end: row of q past the sequence's last token.
        context: the sequence's KV positions; its last token sees all of them.
        num_tiles: real entries.
    """

    sequence: Int32[Array, " M"]
    start: Int32[Array, " M"]
    end: Int32[Array, " M"]
    context: Int32[Array, " M"]
    num_tiles: Int32[Array, ""]


class WorkLists(NamedTuple):
    """Everything the xla backend does in a step.

    Arguments:
        pages: the block tables cut into blocks: the pages of each.
        decodes: work of the sequences with one token; None where they are chunks too.
        chunks: work of the others; None in a step of decodes alone.
    """

    pages: Int32[Array, "S blocks pages_per_block"]
    decodes: DecodeItems | None
    chunks: ChunkTiles | None


def chunk_rows(num_tokens: int, *, one_path: bool) -> int:
    """Query tokens in a chunk tile of a bucket of ``num_tokens``; the same in every bucket with ``one_path``."""
    return ONE_PATH_ROWS if one_path else min(CHUNK_ROWS, num_tokens)


def work_lists(
    query_starts: Int32[Array, " S_plus_1"],
    context_lens: Int32[Array, " S"],
    block_tables: Int32[Array, "S P"],
    *,
    num_tokens: int,
    page_size: int,
    window: int | None,
    decode_only: bool,
    one_path: bool = False,
) -> WorkLists:
    """Cut a step into decode items and chunk tiles."""
    num_seqs, per_block = context_lens.shape[0], BLOCK // page_size
    pages = jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % per_block)))
    pages = pages.reshape(num_seqs, -1, per_block)
    blocks = pages.shape[1]
    if one_path:
        tiles = _chunk_tiles(query_starts, context_lens, num_tokens, one_path=True)
        return WorkLists(pages=pages, decodes=None, chunks=tiles)
    if decode_only:
        token_of = jnp.where(context_lens > 0, jnp.arange(num_tokens, dtype=jnp.int32), num_tokens)
        return WorkLists(
            pages=pages, decodes=_decode_items(token_of, num_tokens, context_lens, blocks, window), chunks=None
        )
    token_of = jnp.where(query_starts[1:] - query_starts[:-1] == 1, query_starts[:-1], num_tokens)
    return WorkLists(
        pages=pages,
        decodes=_decode_items(token_of, num_tokens, context_lens, blocks, window),
        chunks=_chunk_tiles(query_starts, context_lens, num_tokens, one_path=False),
    )


def _decode_items(
    token_of: Int32[Array, " S"], num_tokens: int, context_lens: Int32[Array, " S"], blocks: int, window: int | None
) -> DecodeItems:
    num_seqs = context_lens.shape[0]
    oldest = jnp.zeros_like(context_lens) if window is None else jnp.maximum(context_lens - window, 0)
    counts = jnp.where(token_of < num_tokens, -(-context_lens // BLOCK) - oldest // BLOCK, 0)
    sequence, number, real = _enumerate(counts, most=blocks, size=num_seqs * blocks + MAX_GROUP)
    block = oldest[sequence] // BLOCK + number
    rank_of = jnp.cumsum(counts > 0, dtype=jnp.int32) - 1
    return DecodeItems(
        sequence=sequence,
        block=jnp.where(real, sequence * blocks + block, 0),
        rank=jnp.where(real, rank_of[sequence], num_seqs),
        begin=oldest[sequence] - block * BLOCK,
        end=jnp.where(real, context_lens[sequence] - block * BLOCK, 0),
        num_items=jnp.sum(counts),
        rank_of=rank_of,
        token_of=token_of,
    )


def _chunk_tiles(
    query_starts: Int32[Array, " S_plus_1"], context_lens: Int32[Array, " S"], num_tokens: int, *, one_path: bool
) -> ChunkTiles:
    rows = chunk_rows(num_tokens, one_path=one_path)
    starts, ends = query_starts[:-1], query_starts[1:]
    counts = jnp.where(ends - starts > (0 if one_path else 1), -(-(ends - starts) // rows), 0)
    most = -(-num_tokens // rows)
    sequence, number, _ = _enumerate(counts, most=most, size=most + starts.shape[0])
    return ChunkTiles(
        sequence=sequence,
        start=starts[sequence] + number * rows,
        end=ends[sequence],
        context=context_lens[sequence],
        num_tiles=jnp.sum(counts),
    )


def _enumerate(
    counts: Int32[Array, " S"], *, most: int, size: int
) -> tuple[Int32[Array, " size"], Int32[Array, " size"], Bool[Array, " size"]]:
    """List ``counts[s] <= most`` things of each s: owner, number inside the owner, and whether the entry is real.

    counts 2 0 1, size 5  ->  owner 0 0 2 0 0, number 0 1 0 0 0, real 1 1 1 0 0
    """
    number = jnp.arange(most, dtype=jnp.int32)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    place = jnp.where(number < counts[:, None], (ends - counts)[:, None] + number, size)  # size: dropped
    thing = jnp.arange(counts.shape[0] * most, dtype=jnp.int32)
    listed = jnp.zeros(size, jnp.int32).at[place.reshape(-1)].set(thing, mode="drop")
    return listed // most, listed % most, jnp.arange(size, dtype=jnp.int32) < ends[-1]
