"""The work of a step for the triton kernels: tiles of the prompt chunks, and splits of the single tokens' contexts.

Five tokens: sequence 0 decodes at context 700, sequence 1 prefills three, one token is padding; 3 query heads a KV
head, tiles of 64 rows, splits of 256 positions.

    query_starts   0 1 4
    starts         0 1 4 5      the padding is one more sequence, with context 0: its tile writes zeros
    tiles          sequence 1 2 3   first 0 0 .     each tile holds up to 64 // 3 = 21 tokens; 3 is an idle tile
    splits         sequence 0 0 0   split 0 1 2     positions 0..255, 256..511, 512..699
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Int32

from pallas_kernels.triton.targets import Target, default_target
from pallas_kernels.triton.tiles import Tiles, tile_shapes

PROGRAMS_A_CORE = 4
"""Programs that the splits of a step should come to, for each core: that many of the decode kernel run on one at once
(their shared memory and registers allow 4 to 6), and more would only merge more."""
LEAST_SPLIT = 256
"""Fewest positions of a split: reading them takes longer than writing and merging its partial result."""


class QueryTiles(NamedTuple):
    """The query tiles of a step, sequence after sequence; M entries, the last ones idle.

    Arguments:
        sequence: whose tokens the tile holds; S is the padding, S + 1 an idle tile.
        first: the tile's first token, counted inside its sequence.
        starts: query starts of the sequences and of the padding, and T.
        contexts: context lengths of the sequences and, 0, of the padding.
    """

    sequence: Int32[Array, " M"]
    first: Int32[Array, " M"]
    starts: Int32[Array, " S_plus_2"]
    contexts: Int32[Array, " S_plus_1"]


class DecodeSplits(NamedTuple):
    """Runs of positions of the sequences that have one token; M entries, the last ones idle.

    Arguments:
        sequence: whose positions they are; S: an idle entry.
        split: which of the sequence's runs.
        first: each sequence's first entry.
        counts: each sequence's entries; 0 for those that have more than one token or none.
        positions: positions of a run (the last one of a sequence may have fewer).
        tokens: row of q of each sequence.
        contexts: context lengths.
    """

    sequence: Int32[Array, " M"]
    split: Int32[Array, " M"]
    first: Int32[Array, " S"]
    counts: Int32[Array, " S"]
    positions: Int32[Array, " 1"]
    tokens: Int32[Array, " S"]
    contexts: Int32[Array, " S"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TritonWork:
    """Everything the triton backend does in a step.

    Arguments:
        tiles: work of the sequences with several tokens, and the padding; None in a step of decodes alone.
        splits: work of the sequences with one token; None where they are tiles too.
        block_tables: page numbers of the sequences.
        target: what the tile shapes were chosen for.
        tile_rows: token x head rows of a query tile, which one or several programs have.
        chunk_tiles: tile shapes of the chunks.
        decode_tiles: tile shapes of the decodes.
    """

    tiles: QueryTiles | None
    splits: DecodeSplits | None
    block_tables: Int32[Array, "S P"]
    target: Target = dataclasses.field(metadata={"static": True})
    tile_rows: int = dataclasses.field(metadata={"static": True})
    chunk_tiles: Tiles = dataclasses.field(metadata={"static": True})
    decode_tiles: Tiles = dataclasses.field(metadata={"static": True})


def triton_work(
    query_starts: Int32[Array, " S_plus_1"],
    context_lens: Int32[Array, " S"],
    block_tables: Int32[Array, "S P"],
    *,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None,
    decode_only: bool,
    target: Target,
    one_path: bool = False,
    rows: int | None = None,
) -> TritonWork:
    """Cut a step into tiles and splits. ``rows`` of a query tile; None: what the tile table says, and room for all
    heads of a group."""
    group = num_heads // num_kv_heads
    chunk_tiles = tile_shapes(target, head_dim, group, decode=False)
    rows = rows or max(chunk_tiles.narrow.rows, pl.next_power_of_2(group))
    shared: dict[str, Any] = {
        "block_tables": block_tables,
        "target": target,
        "tile_rows": rows,
        "chunk_tiles": chunk_tiles,
        "decode_tiles": tile_shapes(target, head_dim, group, decode=True),
    }
    if one_path:
        tiles = query_tiles(query_starts, context_lens, num_tokens, rows // group, one_path=True)
        return TritonWork(tiles=tiles, splits=None, **shared)
    if decode_only:
        # As in _enumerate: 0, 1, ... of which the compiler doesn't know it.
        tokens = jnp.maximum(query_starts[:-1], jnp.arange(num_tokens, dtype=jnp.int32))
        is_decode = jnp.ones(num_tokens, bool)  # padding rows too: theirs is the program that writes zeros
    else:
        tokens = query_starts[:-1]
        is_decode = query_starts[1:] - query_starts[:-1] == 1
    return TritonWork(
        tiles=None if decode_only else query_tiles(query_starts, context_lens, num_tokens, rows // group),
        splits=decode_splits(tokens, is_decode, context_lens, window, num_splits=wanted_splits(num_kv_heads, target)),
        **shared,
    )


def wanted_splits(num_kv_heads: int, target: Target) -> int:
    """Splits that fill a GPU; each is a program a KV head."""
    return -(-PROGRAMS_A_CORE * target.num_cores // num_kv_heads)


def decode_entries(num_seqs: int, num_kv_heads: int) -> int:
    """Entries of :class:`DecodeSplits`, and rows of partial results, on the GPU that a program is traced for."""
    return wanted_splits(num_kv_heads, default_target()) + num_seqs


def query_tiles(
    query_starts: Int32[Array, " S_plus_1"],
    context_lens: Int32[Array, " S"],
    num_tokens: int,
    tokens: int,
    *,
    one_path: bool = False,
) -> QueryTiles:
    """Cut chunks and padding into tiles of ``tokens`` tokens; with ``one_path`` single tokens too."""
    starts = jnp.append(query_starts, jnp.int32(num_tokens))
    queries = starts[1:] - starts[:-1]
    counts = -(-queries // tokens)
    if not one_path:
        is_decode = (queries == 1).at[-1].set(False)
        counts = jnp.where(is_decode, 0, counts)
    # A sequence fills tiles but for its last one, and no tile is without a token.
    size = min(num_tokens, num_tokens // tokens + counts.shape[0])
    sequence, number = _enumerate(counts, size)
    return QueryTiles(
        sequence=sequence, first=number * tokens, starts=starts, contexts=jnp.append(context_lens, jnp.int32(0))
    )


def decode_splits(
    tokens: Int32[Array, " S"],
    is_decode: Int32[Array, " S"],
    context_lens: Int32[Array, " S"],
    window: int | None,
    *,
    num_splits: int,
) -> DecodeSplits:
    """Cut the decodes' contexts into runs of equal length, about ``num_splits`` of them in all.

    The length follows from the sum of the contexts: one long row beside many short ones gets most of the splits.
    """
    positions = context_lens if window is None else jnp.minimum(context_lens, window)
    positions = jnp.where(is_decode, positions, 0)
    length = jnp.maximum(-(-positions.sum() // num_splits), LEAST_SPLIT)
    counts = jnp.where(is_decode, jnp.maximum(-(-positions // length), 1), 0)
    sequence, split = _enumerate(counts, num_splits + context_lens.shape[0])
    return DecodeSplits(
        sequence=sequence,
        split=split,
        first=jnp.cumsum(counts, dtype=jnp.int32) - counts,
        counts=counts,
        positions=length[None],
        tokens=tokens,
        contexts=context_lens,
    )


def _enumerate(counts: Int32[Array, " S"], size: int) -> tuple[Int32[Array, " size"], Int32[Array, " size"]]:
    """List ``counts[s]`` things of each s: owner (S past the last one) and number inside the owner.

    counts 2 0 1, size 5  ->  owner 0 0 2 3 3, number 0 1 0 . .
    """
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    # 0, 1, ... of which the compiler doesn't know it: beside all-reduces it would write what follows from that alone
    # (of a single row, all) anew in every layer.
    thing = jnp.maximum(jnp.arange(size, dtype=jnp.int32), jnp.minimum(counts[0], 0))
    # compare_all: any other method is a loop, which would break the step's CUDA graph.
    owner = jnp.searchsorted(ends, thing, side="right", method="compare_all").astype(jnp.int32)
    return owner, thing - (ends - counts).at[owner].get(mode="clip")
