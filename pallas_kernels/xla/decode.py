"""Attention of sequences with one query token: a flat list of blocks over the batch, a few of them an iteration.

The cost follows the sum of the contexts. A loop to the batch's longest context, gathers of a static width, branches
over widths and loops per sequence were all slower, or compile for many seconds.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.xla.blocks import MASKED, LayerKV, capped, normalised
from pallas_kernels.xla.work import BLOCK, MAX_GROUP, DecodeItems, WorkLists

GROUP_BYTES = 2**19
"""Most bytes of keys that an iteration gathers: they should still be cached when the product reads them. Measured at 32
rows x 256 positions on 2 cores with 512 KiB of L2 each: 1 MiB costs a tenth more, 128 KiB a quarter."""
BLOCK_DIAGONAL_HEADS = 4
"""Most KV heads for which multiplying by the zeros of a block-diagonal q costs less than transposing K and V."""


def attend_decodes(
    q: Float[Array, "S H D"],
    kv: LayerKV,
    work: WorkLists,
    items: DecodeItems,
    *,
    soft_cap: float | None,
    sinks: Float[Array, " H"] | None,
) -> Float[Array, "S H D"]:
    """Attention of one (scaled) query token for each sequence; anything finite for sequences that aren't decodes."""
    pages = work.pages.reshape(-1, work.pages.shape[2])
    num_seqs, num_heads, head_dim = q.shape
    group = _group_size(num_seqs, BLOCK * kv.num_heads * head_dim * kv.dtype.itemsize)
    position = jnp.arange(BLOCK, dtype=jnp.int32)
    place = jnp.arange(group, dtype=jnp.int32)

    def attend_group(i, carry):
        weighted, peak, total = carry
        sequence, block, rank, begin, end = (lax.dynamic_slice_in_dim(x, i * group, group) for x in items[:5])
        real = (position >= begin[:, None]) & (position < end[:, None])
        keys, values = kv.read(pages[block], real)
        scores = jnp.where(real[:, None], capped(_scores(q[sequence], keys, kv.num_heads), soft_cap), MASKED)
        item_peak = scores.max(-1)
        weights = jnp.exp(scores - item_peak[..., None])
        item_total = weights.sum(-1)
        item_weighted = _weighted_sum(weights.astype(kv.dtype), values, kv.num_heads)

        # Merge the items into the ranks that they belong to: rank[0] and the group - 1 that follow it.
        mine = (rank - rank[0] == place[:, None])[..., None]
        old_peak, old_total, old_weighted = (
            lax.dynamic_slice_in_dim(x, rank[0], group) for x in (peak, total, weighted)
        )
        new_peak = jnp.maximum(old_peak, jnp.where(mine, item_peak, MASKED).max(1))
        keep = jnp.exp(old_peak - new_peak)
        share = jnp.where(mine, jnp.exp(item_peak - new_peak[:, None]), 0.0)
        new_total = old_total * keep + (share * item_total).sum(1)
        new_weighted = old_weighted * keep[..., None] + (share[..., None] * item_weighted).sum(1)
        return tuple(
            lax.dynamic_update_slice_in_dim(x, new, rank[0], 0)
            for x, new in ((weighted, new_weighted), (peak, new_peak), (total, new_total))
        )

    ranks = num_seqs + group  # rank S takes what padding items bring, the rest keeps slices from being clamped
    carry = (
        jnp.zeros((ranks, num_heads, head_dim), jnp.float32),
        jnp.full((ranks, num_heads), MASKED, jnp.float32),
        jnp.zeros((ranks, num_heads), jnp.float32),
    )
    weighted, peak, total = lax.fori_loop(0, (items.num_items + group - 1) // group, attend_group, carry)
    return normalised(weighted, peak, total, sinks)[items.rank_of]


def _group_size(num_seqs: int, block_bytes: int) -> int:
    """Items an iteration: a power of two, few for few sequences (the last iteration is filled up with padding)."""
    group = MAX_GROUP
    while group > 1 and (group * block_bytes > GROUP_BYTES or group >= 2 * max(2, num_seqs)):
        group //= 2
    return group


def _scores(
    q: Float[Array, "items H D"], keys: Float[Array, "items BLOCK KD"], num_kv_heads: int
) -> Float[Array, "items H BLOCK"]:
    """Products of each item's query heads with the keys of their KV head."""
    items, num_heads, head_dim = q.shape
    if num_kv_heads > BLOCK_DIAGONAL_HEADS:
        scores = jnp.einsum(
            "ikgd,ibkd->ikgb",
            q.reshape(items, num_kv_heads, -1, head_dim),
            keys.reshape(items, BLOCK, num_kv_heads, head_dim),
            preferred_element_type=jnp.float32,
        )
        return scores.reshape(items, num_heads, BLOCK)
    own = jnp.eye(num_kv_heads, dtype=q.dtype)[:, None, :, None]
    diagonal = q.reshape(items, num_kv_heads, -1, 1, head_dim) * own  # zeros outside the head's own columns
    return jnp.einsum("ihc,ibc->ihb", diagonal.reshape(items, num_heads, -1), keys, preferred_element_type=jnp.float32)


def _weighted_sum(
    weights: Float[Array, "items H BLOCK"], values: Float[Array, "items BLOCK KD"], num_kv_heads: int
) -> Float[Array, "items H D"]:
    """Values of each head's KV head, summed by weight."""
    items, num_heads, _ = weights.shape
    if num_kv_heads > BLOCK_DIAGONAL_HEADS:
        summed = jnp.einsum(
            "ikgb,ibkd->ikgd",
            weights.reshape(items, num_kv_heads, -1, BLOCK),
            values.reshape(items, BLOCK, num_kv_heads, -1),
            preferred_element_type=jnp.float32,
        )
        return summed.reshape(items, num_heads, -1)
    every = jnp.einsum("ihb,ibc->ihc", weights, values, preferred_element_type=jnp.float32)
    every = every.reshape(items, num_kv_heads, num_heads // num_kv_heads, num_kv_heads, -1)
    return jnp.stack([every[:, head, :, head] for head in range(num_kv_heads)], 1).reshape(items, num_heads, -1)
