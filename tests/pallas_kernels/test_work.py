"""The work lists of the xla backend and the tile table of the triton backend, against plain enumeration."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.triton.tiles import query_tiles, tile_shape
from pallas_kernels.xla.work import BLOCK, CHUNK_ROWS, work_lists

CONTEXTS = [300, 0, 20, 128, 1, 129]
QUERIES = [1, 0, 4, 1, 1, 100]


def lists(*, window=None, decode_only=False, contexts=CONTEXTS, queries=QUERIES, page_size=16, width=24):
    starts = jnp.cumsum(jnp.array([0, *queries], jnp.int32), dtype=jnp.int32)
    tables = jnp.arange(len(contexts) * width, dtype=jnp.int32).reshape(len(contexts), width)
    return work_lists(
        starts,
        jnp.array(contexts, jnp.int32),
        tables,
        num_tokens=len(contexts) if decode_only else sum(queries),
        page_size=page_size,
        window=window,
        decode_only=decode_only,
    )


def decode_items(work):
    """The real items as (sequence, block in the sequence, begin, end, rank)."""
    items, blocks = work.decodes, work.pages.shape[0] // len(CONTEXTS)
    rows = zip(*(np.asarray(x)[: int(items.num_items)].tolist() for x in items[:5]), strict=True)
    return [(s, block - s * blocks, begin, min(end, BLOCK), rank) for s, block, rank, begin, end in rows]


def test_decode_items_are_the_blocks_of_sequences_with_one_token():
    assert decode_items(lists()) == [
        (0, 0, 0, 128, 0),
        (0, 1, -128, 128, 0),
        (0, 2, -256, 44, 0),
        (3, 0, 0, 128, 1),
        (4, 0, 0, 1, 2),
    ]


def test_decode_items_skip_blocks_before_the_window():
    items = decode_items(lists(window=50))
    assert [(s, block) for s, block, *_ in items] == [(0, 1), (0, 2), (3, 0), (4, 0)]
    assert items[0][2] == 250 - 128


def test_in_a_step_of_decodes_every_context_has_items():
    work = lists(decode_only=True)
    assert work.chunks is None
    assert [s for s, *_ in decode_items(work)] == [0, 0, 0, 2, 3, 4, 5, 5]


def test_padding_items_hold_no_position_and_a_rank_of_their_own():
    items = lists().decodes
    count = int(items.num_items)
    assert not np.asarray(items.end)[count:].any()
    assert (np.asarray(items.rank)[count:] == len(CONTEXTS)).all()


@pytest.mark.parametrize("page_size", [8, 128])
def test_blocks_hold_the_pages_of_their_positions(page_size):
    work = lists(page_size=page_size, width=3 * BLOCK // page_size + 1)
    assert work.pages.shape == (6 * 4, BLOCK // page_size)
    width = 3 * BLOCK // page_size + 1
    assert work.pages[4 + 1, 0] == width + BLOCK // page_size


def test_chunk_tiles_cover_the_tokens_of_longer_queries():
    tiles = lists().chunks
    count = int(tiles.num_tiles)
    assert np.asarray(tiles.sequence)[:count].tolist() == [2, 5, 5]
    assert np.asarray(tiles.start)[:count].tolist() == [1, 7, 7 + CHUNK_ROWS]
    assert np.asarray(tiles.end)[:count].tolist() == [5, 107, 107]
    assert np.asarray(tiles.context)[:count].tolist() == [20, 129, 129]


def test_query_tiles_cover_every_token_once_padding_included():
    for queries, padding in ([[1, 0, 3], 1], [[50, 1, 1], 12], [[1] * 5, 0], [[0, 0], 64]):
        starts = np.cumsum([0, *queries]).astype(np.int32)
        num_tokens = int(starts[-1]) + padding
        tiles = query_tiles(
            jnp.asarray(starts),
            jnp.ones(len(queries), jnp.int32),
            jnp.zeros((len(queries), 1), jnp.int32),
            num_tokens=num_tokens,
            group=3,
            head_dim=64,
            decode_only=False,
        )
        seen = []
        for sequence, first in zip(tiles.sequence.tolist(), tiles.first.tolist(), strict=True):
            if sequence <= len(queries):
                start, end = tiles.starts[sequence], tiles.starts[sequence + 1]
                seen += range(int(start) + first, min(int(end), int(start) + first + 21))
        assert seen == list(range(num_tokens))


def test_a_tile_has_room_for_all_heads_of_a_group():
    assert tile_shape(64, 71, decode_only=True).rows == 128


def test_head_sizes_without_a_tile_are_refused():
    with pytest.raises(ValueError, match="head_dim must be at most 256 for backend triton, got 512"):
        tile_shape(512, 1, decode_only=False)
