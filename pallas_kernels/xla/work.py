"""Work lists of the xla backend: what there is to attend to, as flat lists that loops of dynamic length walk.

A step with five tokens: sequence 0 decodes (one token, 300 positions), sequence 1 prefills four tokens of 20.

    query_starts  0 1 5        context_lens  300 20
    decode items, DECODE_BLOCK = 128:  (sequence, block) = (0, 0) (0, 1) (0, 2)
    chunk tiles, CHUNK_ROWS >= 4:      (sequence, first token in it) = (1, 0)
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

DECODE_BLOCK = 128
"""KV positions in a decode work item."""
CHUNK_ROWS = 64
"""Query tokens in a chunk tile."""


class DecodeItems(NamedTuple):
    """Blocks of DECODE_BLOCK positions of the sequences that have one query token, sequence after sequence.

    Arguments:
        sequence: the item's sequence.
        block: the item's positions are ``[block * DECODE_BLOCK, (block + 1) * DECODE_BLOCK)``.
        rank: the place of the item's sequence among the sequences that have items: consecutive items hold
            consecutive ranks, so a group of I items touches at most I neighbouring ranks.
        count: items in the list; what follows is padding.
        rank_of: rank of each sequence; meaningless without items.
        token_of: query token of each sequence; T and more for sequences without items.
    """

    sequence: Int32[Array, " M"]
    block: Int32[Array, " M"]
    rank: Int32[Array, " M"]
    count: Int32[Array, ""]
    rank_of: Int32[Array, " S"]
    is_decode: Int32[Array, " S"]


class ChunkTiles(NamedTuple):
    """Tiles of CHUNK_ROWS query tokens of the sequences that have more than one.

    Arguments:
        sequence: the tile's sequence.
        first: the tile's first token, counted inside its sequence's chunk.
        count: tiles in the list; what follows is padding.
    """

    sequence: Int32[Array, " M"]
    first: Int32[Array, " M"]
    count: Int32[Array, ""]


def flatten(counts: Int32[Array, " S"], size: int) -> tuple[Int32[Array, " M"], Int32[Array, " M"], Int32[Array, ""]]:
    """Enumerate ``counts[s]`` things of each s in a list of static size.

    Returns:
        owner s and number inside the owner of each entry, and how many entries are real.

        counts 2 0 1, size 4  ->  owner 0 0 2 2, number 0 1 0 1, 3
    """
    ends = jnp.cumsum(counts)
    entry = jnp.arange(size, dtype=jnp.int32)
    owner = jnp.searchsorted(ends, entry, side="right", method="scan_unrolled").astype(jnp.int32)
    owner = jnp.minimum(owner, counts.shape[0] - 1)
    return owner, entry - (ends - counts)[owner], ends[-1]


def decode_items(
    query_starts: Int32[Array, "S+1"],
    context_lens: Int32[Array, " S"],
    block_tables: Int32[Array, "S P"],
    *,
    page_size: int,
    window: int | None,
    decode_only: bool,
) -> DecodeItems:
    num_seqs, width = block_tables.shape
    if decode_only:
        is_decode = context_lens > 0
    else:
        is_decode = query_starts[1:] - query_starts[:-1] == 1
    first = jnp.zeros_like(context_lens)
    if window is not None:
        first = jnp.maximum(context_lens - window, 0) // DECODE_BLOCK
    counts = jnp.where(is_decode, -(-context_lens // DECODE_BLOCK) - first, 0)
    size = num_seqs * -(-width * page_size // DECODE_BLOCK)
    sequence, number, count = flatten(counts, size)
    rank_of = jnp.cumsum(counts > 0, dtype=jnp.int32) - 1
    return DecodeItems(
        sequence=sequence,
        block=first[sequence] + number,
        rank=rank_of[sequence],
        count=count,
        rank_of=rank_of,
        is_decode=is_decode,
    )


def chunk_tiles(query_starts: Int32[Array, "S+1"], *, num_tokens: int) -> ChunkTiles:
    query_lens = query_starts[1:] - query_starts[:-1]
    counts = jnp.where(query_lens > 1, -(-query_lens // CHUNK_ROWS), 0)
    sequence, number, count = flatten(counts, num_tokens // CHUNK_ROWS + query_lens.shape[0])
    return ChunkTiles(sequence=sequence, first=number * CHUNK_ROWS, count=count)
