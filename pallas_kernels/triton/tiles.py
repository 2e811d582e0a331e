"""Tile sizes of the triton kernels, and the table of query tiles of a step.

Five tokens: sequence 0 decodes, sequence 1 prefills three, one token is padding; 3 query heads a KV head, 64 rows.

    query_starts   0 1 4
    starts         0 1 4 5      the padding is one more sequence, with context 0: its tile writes zeros
    sequence       0 1 2 3 3    3 is past the last sequence: nothing to do
    first          0 0 0 . .    each tile holds up to 64 // 3 = 21 tokens of one sequence
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Int32


class TileShape(NamedTuple):
    """How a kernel cuts its work.

    Arguments:
        rows: token x head rows of a query tile; a power of two from 16, the least that a tensor core takes.
        block: KV positions of one product, for pages of 2-byte elements.
        float32_block: the same for float32 pages.
        num_warps: warps of a program.
        num_stages: KV blocks in flight.
    """

    rows: int
    block: int
    float32_block: int
    num_warps: int
    num_stages: int


CHUNK_TILES = {
    # 64 rows are one wgmma of Hopper, 16 a warp. Compiled for H200 (bfloat16): 128 registers at head size 64, 177 at
    # 128, 244 at 256, no spills; for A100 at 128: 255, no spills.
    128: TileShape(rows=64, block=64, float32_block=16, num_warps=4, num_stages=2),
    # Block 64 asks for 106,496 bytes of shared memory; an L4 has 101,376. float32 asks for 188,416: Hopper has them.
    256: TileShape(rows=64, block=32, float32_block=16, num_warps=4, num_stages=2),
}
"""Tiles of steps with chunks, by the largest head size that they serve."""

DECODE_TILES = {
    # One token a tile: the products are mostly padding and the time goes into loads, so one more block is in flight.
    128: TileShape(rows=16, block=64, float32_block=16, num_warps=4, num_stages=3),
    # The blocks for the L4's sake, as above.
    256: TileShape(rows=16, block=32, float32_block=16, num_warps=4, num_stages=3),
}
"""Tiles of steps of decodes alone, by the largest head size that they serve."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryTiles:
    """The query tiles of a step, sequence after sequence; M entries, the last ones idle.

    Arguments:
        sequence: whose tokens the tile holds; S is the padding, S + 1 an idle tile.
        first: the tile's first token, counted inside its sequence.
        starts: query starts of the sequences and of the padding, and T.
        contexts: context lengths of the sequences and, 0, of the padding.
        block_tables: page numbers of the sequences.
        shape: the kernel's tile.
    """

    sequence: Int32[Array, " M"]
    first: Int32[Array, " M"]
    starts: Int32[Array, " S_plus_2"]
    contexts: Int32[Array, " S_plus_1"]
    block_tables: Int32[Array, "S P"]
    shape: TileShape = dataclasses.field(metadata={"static": True})


def tile_shape(head_dim: int, group: int, *, decode_only: bool) -> TileShape:
    """The tile for heads of ``head_dim``, ``group`` query heads a KV head."""
    table = DECODE_TILES if decode_only else CHUNK_TILES
    served = [largest for largest in table if head_dim <= largest]
    if not served:
        raise ValueError(f"head_dim must be at most {max(table)} for backend triton, got {head_dim}")
    shape = table[min(served)]
    return shape._replace(rows=max(shape.rows, pl.next_power_of_2(group)))


def query_tiles(
    query_starts: Int32[Array, " S_plus_1"],
    context_lens: Int32[Array, " S"],
    block_tables: Int32[Array, "S P"],
    *,
    num_tokens: int,
    group: int,
    head_dim: int,
    decode_only: bool,
) -> QueryTiles:
    """Cut a step into tiles of ``rows // group`` tokens."""
    shape = tile_shape(head_dim, group, decode_only=decode_only)
    tokens = shape.rows // group
    starts = jnp.append(query_starts, jnp.int32(num_tokens))
    counts = -(-(starts[1:] - starts[:-1]) // tokens)
    ends = jnp.cumsum(counts)
    # A sequence fills tiles but for its last one, and no tile is without a token.
    tile = jnp.arange(min(num_tokens, num_tokens // tokens + counts.shape[0]), dtype=jnp.int32)
    # compare_all: any other method is a loop, which would break the step's CUDA graph.
    sequence = jnp.searchsorted(ends, tile, side="right", method="compare_all").astype(jnp.int32)
    return QueryTiles(
        sequence=sequence,
        first=(tile - (ends - counts).at[sequence].get(mode="clip")) * tokens,
        starts=starts,
        contexts=jnp.append(context_lens, jnp.int32(0)),
        block_tables=block_tables,
        shape=shape,
    )
