"""Attention of sequences with several query tokens: tiles of tokens by blocks of positions, bounded by causality."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.xla.blocks import MASKED, LayerKV, capped, normalised
from pallas_kernels.xla.work import BLOCK, ChunkTiles, WorkLists, chunk_rows


def attend_chunks(
    q: Float[Array, "T H D"],
    kv: LayerKV,
    work: WorkLists,
    tiles: ChunkTiles,
    *,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " H"] | None,
) -> Float[Array, "T H D"]:
    """Attention of the (scaled) query tokens of chunks; 0 for the tokens of decodes and for padding.

    Blocks begin at multiples of BLOCK and are folded from first to last, and what a token may not see adds exact zeros:
    so its bits depend on the shape of a tile, and on nothing else.
    """
    num_tokens, num_heads, head_dim = q.shape
    rows = chunk_rows(num_tokens, one_path=work.decodes is None)
    by_head = (kv.num_heads, rows * num_heads // kv.num_heads)  # a KV head's products: token x group rows at once
    token_of_row = jnp.arange(by_head[1], dtype=jnp.int32) * kv.num_heads // num_heads
    token = jnp.arange(rows, dtype=jnp.int32)
    padded_q = jnp.pad(q, ((0, rows), (0, 0), (0, 0)))  # the last tile's slice isn't clamped

    def attend_tile(i, out):
        sequence, start, end, context = (x[i] for x in tiles[:4])
        first_position = context - (end - start)
        oldest = 0 if window is None else jnp.maximum(first_position - window + 1, 0)
        tile_q = lax.dynamic_slice_in_dim(padded_q, start, rows)
        tile_q = tile_q.reshape(rows, kv.num_heads, -1, head_dim).swapaxes(0, 1).reshape(*by_head, head_dim)
        query_position = first_position + token_of_row[:, None]

        def attend_block(j, carry):
            weighted, peak, total = carry
            position = j * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
            pages = work.pages[sequence, j]
            keys, values = (
                x.reshape(BLOCK, kv.num_heads, head_dim).swapaxes(0, 1)
                for x in kv.read(pages, (position >= oldest) & (position < context))
            )
            seen = position <= query_position
            if window is not None:
                seen &= position > query_position - window
            scores = jnp.einsum("krd,kbd->krb", tile_q, keys, preferred_element_type=jnp.float32)
            scores = jnp.where(seen, capped(scores, soft_cap), MASKED)
            new_peak = jnp.maximum(peak, scores.max(-1))
            keep = jnp.exp(peak - new_peak)
            # A row that has seen nothing yet weighs masked positions with 1; `keep` is 0 as soon as it sees something.
            weights = jnp.exp(scores - new_peak[..., None])
            summed = jnp.einsum("krb,kbd->krd", weights.astype(kv.dtype), values, preferred_element_type=jnp.float32)
            return weighted * keep[..., None] + summed, new_peak, total * keep + weights.sum(-1)

        carry = (
            jnp.zeros((*by_head, head_dim), jnp.float32),
            jnp.full(by_head, MASKED, jnp.float32),
            jnp.zeros(by_head, jnp.float32),
        )
        past_end = jnp.minimum(context, first_position + rows)
        parts = lax.fori_loop(oldest // BLOCK, -(-past_end // BLOCK), attend_block, carry)
        weighted, peak, total = (_by_token(x, rows, num_heads) for x in parts)
        tile_out = normalised(weighted, peak, total, sinks)
        others = lax.dynamic_slice_in_dim(out, start, rows)
        tile_out = jnp.where((start + token < end)[:, None, None], tile_out, others)
        return lax.dynamic_update_slice_in_dim(out, tile_out, start, 0)

    out = jnp.zeros((num_tokens + rows, num_heads, head_dim), jnp.float32)
    return lax.fori_loop(0, tiles.num_tiles, attend_tile, out)[:num_tokens]


def _by_token(x: Float[Array, "K rows_x_group ..."], rows: int, num_heads: int) -> Float[Array, "rows H ..."]:
    by_head = x.reshape(x.shape[0], rows, -1, *x.shape[2:]).swapaxes(0, 1)
    return by_head.reshape(rows, num_heads, *x.shape[2:])
