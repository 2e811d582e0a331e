"""Ragged paged attention as one Pallas kernel: a program for each query tile and KV head.

Rows of a tile are token x group: all query heads that share a KV head, of neighbouring tokens, meet the same keys in
one product. Softmax runs online over blocks of positions, in powers of two (GPUs have no instruction for e^x).
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int32, Shaped

from pallas_kernels.triton.tiles import QueryTiles

MASKED = -1e30
"""Score of a position that a query may not see. Finite: a row with nothing to see has no NaN."""
LOG2_E = math.log2(math.e)


def ragged_paged_attention(
    q: Float[Array, "T H D"],
    kv_pages: Shaped[Array, "F page_size K D"],
    tiles: QueryTiles,
    *,
    layer: int | Int32[Array, ""],
    num_layers: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    interpret: bool,
) -> Float[Array, "T H D"]:
    """:func:`pallas_kernels.ragged_paged_attention`, arguments already checked."""
    _, page_size, num_kv_heads, head_dim = kv_pages.shape
    kernel = functools.partial(
        _kernel,
        group=q.shape[1] // num_kv_heads,
        rows=tiles.shape.rows,
        block=tiles.shape.block if kv_pages.dtype.itemsize == 2 else tiles.shape.float32_block,
        page_size=page_size,
        head_dim=head_dim,
        num_layers=num_layers,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        precision=lax.Precision.HIGHEST if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3,
    )
    return pl.pallas_call(
        kernel,
        grid=(tiles.sequence.shape[0], num_kv_heads),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        input_output_aliases={0: 0},  # a tile reads its rows of q before it writes them: no second buffer
        compiler_params=plgpu.CompilerParams(num_warps=tiles.shape.num_warps, num_stages=tiles.shape.num_stages),
        interpret=interpret,
        name=f"ragged_paged_attention_d{head_dim}",
    )(
        q,
        kv_pages,
        tiles.block_tables,
        tiles.starts,
        tiles.contexts,
        tiles.sequence,
        tiles.first,
        jnp.full((1,), layer, jnp.int32),
    )


def _kernel(
    q_ref,
    kv_ref,
    tables_ref,
    starts_ref,
    contexts_ref,
    sequence_ref,
    first_ref,
    layer_ref,
    out_ref,
    *,
    group: int,
    rows: int,
    block: int,
    page_size: int,
    head_dim: int,
    num_layers: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    precision: lax.Precision | lax.DotAlgorithmPreset,
) -> None:
    """One query tile and one KV head. Arrays in here have power-of-two sizes, so some rows and columns are masked.

    ``precision`` is that of float32 products: by default they would round their inputs to TF32's 10 bits, and as plain
    float32 they run without tensor cores and spill; three TF32 products come close to float32.
    """
    tile, kv_head = pl.program_id(0), pl.program_id(1)
    sequence = sequence_ref[tile]

    @pl.when(sequence < contexts_ref.shape[0])
    def _attend():
        start, first, context = starts_ref[sequence], first_ref[tile], contexts_ref[sequence]
        num_queries = starts_ref[sequence + 1] - start
        row = jnp.arange(rows)
        token = first + row // group
        feature = jnp.arange(pl.next_power_of_2(head_dim))
        in_head = feature < head_dim
        in_tile = ((row < rows // group * group) & (token < num_queries))[:, None] & in_head[None, :]
        # No two rows share an index, masked ones included: interpret mode writes masked elements back as they were.
        q_index = ((start + token)[:, None], (kv_head * group + row % group)[:, None], feature[None, :])
        dtype = jnp.promote_types(q_ref.dtype, kv_ref.dtype)
        dot = functools.partial(
            lax.dot_general,
            precision=precision if dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )
        q = plgpu.load(q_ref.at[q_index], mask=in_tile, other=0.0).astype(dtype)
        query_position = context - num_queries + token
        oldest = context - num_queries + first
        past_end = jnp.minimum(context, oldest + rows // group)
        oldest = 0 if window is None else jnp.maximum(0, oldest - window + 1)

        def load(flat_page, offset, mask):
            index = (flat_page[:, None], offset[:, None], kv_head, feature[None, :])
            return plgpu.load(kv_ref.at[index], mask=mask[:, None] & in_head[None, :], other=0.0).astype(dtype)

        def attend_block(i, carry):
            weighted, peak, total = carry
            position = oldest + i * block + jnp.arange(block)
            real = position < past_end
            page = plgpu.load(tables_ref.at[sequence, position // page_size], mask=real, other=0)
            keys_page = page * (2 * num_layers) + 2 * layer_ref[0]
            keys = load(keys_page, position % page_size, real)
            scores = dot(q, keys, (((1,), (1,)), ((), ())))
            if soft_cap is None:
                scores *= scale * LOG2_E
            else:
                scores = jnp.tanh(scores * (scale / soft_cap)) * (soft_cap * LOG2_E)
            seen = (position[None, :] <= query_position[:, None]) & real[None, :]
            if window is not None:
                seen &= position[None, :] > query_position[:, None] - window
            scores = jnp.where(seen, scores, MASKED)
            new_peak = jnp.maximum(peak, scores.max(axis=1))
            keep = jnp.exp2(peak - new_peak)
            # A row that has seen nothing yet weighs masked positions with 1; `keep` is 0 once it sees something.
            weights = jnp.exp2(scores - new_peak[:, None])
            values = load(keys_page + 1, position % page_size, real)
            summed = dot(weights.astype(dtype), values, (((1,), (0,)), ((), ())))
            return weighted * keep[:, None] + summed, new_peak, total * keep + weights.sum(axis=1)

        carry = (
            jnp.zeros((rows, feature.shape[0]), jnp.float32),
            jnp.full((rows,), MASKED, jnp.float32),
            jnp.zeros((rows,), jnp.float32),
        )
        weighted, _, total = lax.fori_loop(0, pl.cdiv(past_end - oldest, block), attend_block, carry)
        out = weighted / jnp.where(total == 0, 1, total)[:, None]
        plgpu.store(out_ref.at[q_index], out.astype(out_ref.dtype), mask=in_tile)
