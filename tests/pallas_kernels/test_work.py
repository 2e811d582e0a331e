"""The work lists of the xla backend and the tile table of the triton backend, against plain enumeration."""

from __future__ import annotations

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.triton import tiles
from pallas_kernels.triton.targets import TARGETS
from pallas_kernels.triton.tiles import require_fits, tile_shapes
from pallas_kernels.triton.work import LEAST_SPLIT, decode_splits, query_tiles, triton_work
from pallas_kernels.xla.work import BLOCK, CHUNK_ROWS, work_lists
from tests.pallas_kernels.batches import ragged_batch

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
    items, blocks = work.decodes, work.pages.shape[1]
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
    assert work.pages.shape == (6, 4, BLOCK // page_size)
    width = 3 * BLOCK // page_size + 1
    assert work.pages[1, 1, 0] == width + BLOCK // page_size


def test_chunk_tiles_cover_the_tokens_of_longer_queries():
    tiles = lists().chunks
    count = int(tiles.num_tiles)
    assert np.asarray(tiles.sequence)[:count].tolist() == [2, 5, 5]
    assert np.asarray(tiles.start)[:count].tolist() == [1, 7, 7 + CHUNK_ROWS]
    assert np.asarray(tiles.end)[:count].tolist() == [5, 107, 107]
    assert np.asarray(tiles.context)[:count].tolist() == [20, 129, 129]


def test_query_tiles_cover_the_tokens_of_chunks_and_padding_once():
    for queries, padding in ([[1, 0, 3], 1], [[50, 1, 2], 12], [[1] * 5, 0], [[0, 0], 64]):
        starts = np.cumsum([0, *queries]).astype(np.int32)
        num_tokens = int(starts[-1]) + padding
        tiles = query_tiles(jnp.asarray(starts), jnp.ones(len(queries), jnp.int32), num_tokens, 21)
        seen = []
        for sequence, first in zip(tiles.sequence.tolist(), tiles.first.tolist(), strict=True):
            if sequence <= len(queries):
                start, end = tiles.starts[sequence], tiles.starts[sequence + 1]
                seen += range(int(start) + first, min(int(end), int(start) + first + 21))
        decodes = [start for start, count in zip(starts[:-1], queries, strict=True) if count == 1]
        assert seen == sorted(set(range(num_tokens)) - set(decodes))


def splits_of(contexts, is_decode, *, window=None, num_splits=16):
    """The real splits as (sequence, first position, past the last), and all that was made."""
    splits = decode_splits(
        jnp.arange(len(contexts), dtype=jnp.int32),
        jnp.array(is_decode),
        jnp.array(contexts, jnp.int32),
        window,
        num_splits=num_splits,
    )
    length = int(splits.positions[0])
    real = []
    for sequence, split in zip(splits.sequence.tolist(), splits.split.tolist(), strict=True):
        if sequence < len(contexts):
            begin = split * length + (0 if window is None else max(0, contexts[sequence] - window))
            real.append((sequence, begin, min(begin + length, contexts[sequence])))
    return real, splits


@pytest.mark.parametrize("window", [None, 5000])
def test_splits_cover_each_decode_once_and_a_long_row_gets_most(window):
    contexts = [100] * 20 + [32768] + [300] * 20
    real, splits = splits_of(contexts, [True] * 41, window=window)
    for sequence, context in enumerate(contexts):
        mine = [(begin, end) for owner, begin, end in real if owner == sequence]
        assert mine[0][0] == (0 if window is None else max(0, context - window)) and mine[-1][1] == context
        assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(mine))
        assert len(mine) == int(splits.counts[sequence])
        assert splits.sequence[int(splits.first[sequence])] == sequence
    assert splits.counts[20] >= 7 and splits.counts[0] == 1


def test_short_contexts_are_not_split_and_chunks_have_no_split():
    real, splits = splits_of([LEAST_SPLIT, 900, 0], [True, False, True])
    assert real == [(0, 0, LEAST_SPLIT), (2, 0, 0)], "a padding row has a program that writes its zeros"
    assert splits.counts.tolist() == [1, 0, 1]


def test_a_decode_has_all_heads_of_a_group_or_shares_them():
    """71 query heads a KV head: a program of head size 64 has room for them, others have a part."""
    for head_dim, group, rows in ((64, 71, [128, 64]), (128, 71, [64, 32]), (256, 71, [32, 16]), (128, 28, [32, 32])):
        assert [tile.rows for tile in tile_shapes(TARGETS["h200"], head_dim, group, decode=True)[:2]] == rows


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 8, 71, 128])
def test_every_tile_of_the_tables_fits_its_target(target, head_dim, group):
    dtypes = [("bfloat16", "bfloat16"), ("bfloat16", "int8"), ("float32", "float32"), ("float32", "int8")]
    for decode, (dtype, kv_dtype) in itertools.product((False, True), dtypes):
        tile = tile_shapes(TARGETS[target], head_dim, group, decode=decode).of(dtype)
        require_fits(tile, TARGETS[target], head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype)


def test_a_query_tile_has_room_for_a_token_of_a_large_group():
    starts, contexts = jnp.array([0, 3], jnp.int32), jnp.array([9], jnp.int32)
    for group, rows in ((3, 64), (71, 128), (200, 256)):
        work = triton_work(
            starts,
            contexts,
            jnp.zeros((1, 4), jnp.int32),
            num_tokens=4,
            num_heads=group,
            num_kv_heads=1,
            head_dim=64,
            window=None,
            decode_only=False,
            target=TARGETS["h200"],
        )
        assert work.tile_rows == rows and work.chunk_tiles.narrow.rows == 64


def test_head_sizes_without_a_tile_are_refused():
    with pytest.raises(ValueError, match="head_dim must be at most 256 for backend triton, got 512"):
        tile_shapes(TARGETS["h200"], 512, 1, decode=False)


def test_a_tile_that_does_not_fit_is_refused():
    l4 = TARGETS["l4"]
    tile = tile_shapes(l4, 256, 4, decode=False).of("bfloat16")
    require_fits(tile, l4, head_dim=256, dtype="bfloat16", kv_dtype="bfloat16")
    with pytest.raises(
        ValueError, match=r"must fit the 101,376 bytes of shared memory of an NVIDIA L4, got 1[0-9,]+ bytes"
    ):
        require_fits(tile._replace(block=128), l4, head_dim=256, dtype="bfloat16", kv_dtype="bfloat16")


@pytest.mark.parametrize("decode_only", [False, True])
def test_attention_whose_tile_does_not_fit_is_refused_while_tracing(decode_only, monkeypatch):
    """The interpreter, as which this machine counts, has the tiles and the shared memory of an H200."""
    table = tiles.DECODE_TILES if decode_only else tiles.CHUNK_TILES
    entry = table["h200"][64]
    wide = entry._replace(float32=entry.float32._replace(num_stages=999))
    monkeypatch.setitem(table, "h200", table["h200"] | {64: wide})
    batch = ragged_batch([(1, 9), (1, 5)] if decode_only else [(3, 9)], decode_only=decode_only)
    with pytest.raises(ValueError, match=r"must fit the 232,448 bytes of shared memory .* num_stages=999"):
        batch.attend("triton")


def test_float8_pages_are_refused_where_there_is_no_float8():
    """Capability 8.6 has an L4's tiles and lacks its float8."""
    a10 = dataclasses.replace(TARGETS["l4"], device="NVIDIA A10", compute_capability=(8, 6))
    tile = tile_shapes(a10, 64, 4, decode=True).of("bfloat16")
    require_fits(tile, TARGETS["l4"], head_dim=64, dtype="bfloat16", kv_dtype="float8_e4m3fn")
    with pytest.raises(ValueError, match=r"int8 on an NVIDIA A10: it has no float8 numbers \(compute capability 8\.6"):
        require_fits(tile, a10, head_dim=64, dtype="bfloat16", kv_dtype="float8_e4m3fn")
    tile = tile_shapes(TARGETS["a100"], 64, 4, decode=True).of("bfloat16")
    with pytest.raises(ValueError, match="kv_pages must be of dtype int8 on an NVIDIA A100: it has no float8 numbers"):
        require_fits(tile, TARGETS["a100"], head_dim=64, dtype="bfloat16", kv_dtype="float8_e4m3fn")
