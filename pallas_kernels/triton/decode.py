"""Attention of single tokens: each context in splits that run as programs of their own, and a kernel that merges them.

Flash-decoding (Dao et al. 2023), but for the splits: they follow from the contexts that are there. A row that is one
split writes its result straight out, so a batch that fills the chip by itself has nothing to merge.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from pallas_kernels.triton.attend import MASKED, Geometry, KVRefs, attend, finish, start
from pallas_kernels.triton.tiles import TileShape
from pallas_kernels.triton.work import DecodeSplits


def attend_decodes(
    q: Float[Array, "T H D"],
    kv: KVRefs,
    splits: DecodeSplits,
    tile: TileShape,
    shape: Geometry,
    num_kv_heads: int,
    *,
    sinks: Float[Array, " H"] | None,
    interpret: bool,
) -> Float[Array, "T H D"]:
    """q with the rows of decodes replaced by their attention."""
    num_heads, num_splits = q.shape[1], splits.sequence.shape[0]
    # Only the splits of rows that have several are ever written and read.
    partials = jax.ShapeDtypeStruct((num_splits, num_heads, shape.head_dim), jnp.float32)
    out, partial, log_weight = pl.pallas_call(
        functools.partial(_split_kernel, shape=shape),
        grid=(num_splits, num_kv_heads),
        out_shape=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            partials,
            jax.ShapeDtypeStruct((num_splits, num_heads), jnp.float32),
        ),
        input_output_aliases={0: 0},  # a row that is one split is read before it is written, others are not written
        compiler_params=plgpu.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=interpret,
        name=f"decode_attention_d{shape.head_dim}",
    )(q, kv, splits, sinks)
    return pl.pallas_call(
        functools.partial(_merge_kernel, group=shape.group, head_dim=shape.head_dim),
        grid=(splits.counts.shape[0], num_kv_heads),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        input_output_aliases={0: 0},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name=f"merge_splits_d{shape.head_dim}",
    )(out, partial, log_weight, splits)


def _heads(kv_head: Any, group: int, rows: int, num_heads: int) -> tuple[Any, Any]:
    """Query heads of a KV head and which rows are heads. Rows that aren't point past the last head: interpret mode
    writes masked elements back as they were, and they must not be others' elements."""
    row = jnp.arange(rows)
    is_head = row < group
    return jnp.where(is_head, kv_head * group + row, num_heads + row), is_head


def _split_kernel(
    q_ref: Any,
    kv: KVRefs,
    splits: Any,
    sinks_ref: Any | None,
    out_ref: Any,
    partial_ref: Any,
    log_weight_ref: Any,
    *,
    shape: Geometry,
) -> None:
    """One split of one row and one KV head."""
    entry, kv_head = pl.program_id(0), pl.program_id(1)
    sequence = splits.sequence[entry]

    @pl.when(sequence < splits.counts.shape[0])
    def _attend() -> None:
        token, context, split = splits.tokens[sequence], splits.contexts[sequence], splits.split[entry]
        head, is_head = _heads(kv_head, shape.group, shape.rows, q_ref.shape[1])
        feature = jnp.arange(shape.width)
        mask = is_head[:, None] & (feature < shape.head_dim)[None, :]
        q = plgpu.load(q_ref.at[token, head[:, None], feature[None, :]], mask=mask, other=0.0).astype(shape.dtype)
        sink = None
        if sinks_ref is not None:  # it counts once, in the first split
            sink = plgpu.load(sinks_ref.at[head], mask=is_head & (split == 0), other=MASKED)
        begin = split * splits.positions[0]
        begin += 0 if shape.window is None else jnp.maximum(context - shape.window, 0)
        state = attend(
            q,
            kv,
            start(shape, sink),
            shape,
            sequence=sequence,
            kv_head=kv_head,
            begin=begin,
            end=jnp.minimum(context, begin + splits.positions[0]),
            whole_until=None,  # the loads are what takes time, not the masks
            query_position=jnp.full((shape.rows,), context - 1),
        )
        out = finish(state)
        alone = splits.counts[sequence] == 1

        @pl.when(alone)
        def _write() -> None:
            index = (token, head[:, None], feature[None, :])
            plgpu.store(out_ref.at[index], out.astype(out_ref.dtype), mask=mask)

        @pl.when(jnp.logical_not(alone))
        def _write_partial() -> None:
            plgpu.store(partial_ref.at[entry, head[:, None], feature[None, :]], out, mask=mask)
            plgpu.store(log_weight_ref.at[entry, head], state.peak + jnp.log2(state.total), mask=is_head)


def _merge_kernel(
    q_ref: Any,
    partial_ref: Any,
    log_weight_ref: Any,
    splits: Any,
    out_ref: Any,
    *,
    group: int,
    head_dim: int,
) -> None:
    """All splits of one row and one KV head."""
    del q_ref  # the output, aliased
    sequence, kv_head = pl.program_id(0), pl.program_id(1)
    count, first = splits.counts[sequence], splits.first[sequence]

    @pl.when(count > 1)
    def _merge() -> None:
        rows, feature = pl.next_power_of_2(group), jnp.arange(pl.next_power_of_2(head_dim))
        head, is_head = _heads(kv_head, group, rows, out_ref.shape[1])
        mask = is_head[:, None] & (feature < head_dim)[None, :]

        def add(i: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            summed, peak, total = carry
            log_weight = plgpu.load(log_weight_ref.at[first + i, head], mask=is_head, other=MASKED)
            partial = plgpu.load(partial_ref.at[first + i, head[:, None], feature[None, :]], mask=mask, other=0.0)
            new_peak = jnp.maximum(peak, log_weight)
            keep, weight = jnp.exp2(peak - new_peak), jnp.exp2(log_weight - new_peak)
            return summed * keep[:, None] + partial * weight[:, None], new_peak, total * keep + weight

        nothing = (
            jnp.zeros((rows, feature.shape[0]), jnp.float32),
            jnp.full((rows,), MASKED, jnp.float32),
            jnp.zeros((rows,), jnp.float32),
        )
        summed, _, total = lax.fori_loop(0, count, add, nothing)
        index = (splits.tokens[sequence], head[:, None], feature[None, :])
        plgpu.store(out_ref.at[index], (summed / total[:, None]).astype(out_ref.dtype), mask=mask)
