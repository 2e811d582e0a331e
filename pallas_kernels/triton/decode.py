"""Attention of single tokens: each context in splits that run as programs of their own; the last to end merges them.

Flash-decoding (Dao et al. 2023), but for the splits: they follow from the contexts that are there. A row that is one
split writes its result straight out, so a batch that fills the chip by itself has nothing to merge. Otherwise the
splits of a row and KV head leave partial results and count themselves: the one that comes last finds all others' there.
(Programs don't wait for each other, so it is all one in which order they run.) Query heads of a group that one program
has no registers for are shared out to several, which read the same keys.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.norms import RawQueries
from pallas_kernels.triton.attend import MASKED, Geometry, KVRefs, attend, finish, start
from pallas_kernels.triton.queries import Eps, load_queries, split
from pallas_kernels.triton.tiles import TileShape
from pallas_kernels.triton.work import DecodeSplits

MERGED_AT_ONCE = 4096
"""Elements of partial results that a program of 4 warps holds while it merges: 32 registers a thread."""


def attend_decodes(
    q: Float[Array, "T H D"] | RawQueries,
    kv: KVRefs,
    splits: DecodeSplits,
    arrivals: Int32[Array, "T K"],
    tile: TileShape,
    shape: Geometry,
    num_kv_heads: int,
    *,
    sinks: Float[Array, " H"] | None,
    interpret: bool,
) -> Float[Array, "T H D"]:
    """q with the rows of decodes replaced by their attention. Raw queries are all decodes. ``arrivals`` are zeros."""
    queries, eps = split(q)
    num_heads, num_splits, parts = q.shape[1], splits.sequence.shape[0], pl.cdiv(shape.group, shape.rows)
    # Only the splits of rows that have several are ever written and read.
    partials = jax.ShapeDtypeStruct((num_splits, num_heads, shape.head_dim), jnp.float32)
    _, out, _, _ = pl.pallas_call(
        functools.partial(_kernel, shape=shape, parts=parts, eps=eps, interpret=interpret),
        grid=(num_splits, num_kv_heads, parts),
        out_shape=(
            jax.ShapeDtypeStruct(arrivals.shape, arrivals.dtype),
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            partials,
            jax.ShapeDtypeStruct((num_splits, num_heads), jnp.float32),
        ),
        # A row that is one split is read before it is written. Of others every split reads q, and the last one writes
        # when all have read it. Rows that aren't decodes are not written.
        input_output_aliases={0: 0} if isinstance(q, RawQueries) else {0: 0, 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=interpret,
        name=f"decode_attention_d{shape.head_dim}",
    )(arrivals, queries, kv, splits, sinks)
    return out


def _heads(kv_head: Any, group: int, begin: Any, rows: int, num_heads: int) -> tuple[Any, Any]:
    """Query heads of a KV head from ``begin`` on and which rows are heads. Rows that aren't point past the last head:
    interpret mode writes masked elements back as they were, and they must not be others' elements."""
    row = jnp.arange(rows)
    is_head = begin + row < group
    return jnp.where(is_head, kv_head * group + begin + row, num_heads + row), is_head


def _kernel(
    _: Any,
    queries: Any,
    kv: KVRefs,
    splits: Any,
    sinks_ref: Any | None,
    arrivals_ref: Any,
    out_ref: Any,
    partial_ref: Any,
    log_weight_ref: Any,
    *,
    shape: Geometry,
    parts: int,
    eps: Eps,
    interpret: bool,
) -> None:
    """One split of one row and one KV head, of which it may have a part of the query heads, and the merge of all of
    them if it is the last to end."""
    entry, kv_head, begin_head = pl.program_id(0), pl.program_id(1), pl.program_id(2) * shape.rows
    sequence = splits.sequence[entry]

    @pl.when(sequence < splits.counts.shape[0])
    def _attend() -> None:
        token, context, split = splits.tokens[sequence], splits.contexts[sequence], splits.split[entry]
        head, is_head = _heads(kv_head, shape.group, begin_head, shape.rows, out_ref.shape[1])
        feature = jnp.arange(shape.width)
        mask = is_head[:, None] & (feature < shape.head_dim)[None, :]
        q = load_queries(queries, eps, token, head, feature, shape.head_dim, is_head).astype(shape.dtype)
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
        count = splits.counts[sequence]

        @pl.when(count == 1)
        def _write() -> None:
            index = (token, head[:, None], feature[None, :])
            plgpu.store(out_ref.at[index], out.astype(out_ref.dtype), mask=mask)

        @pl.when(count > 1)
        def _write_partial() -> None:
            plgpu.store(partial_ref.at[entry, head[:, None], feature[None, :]], out, mask=mask)
            plgpu.store(log_weight_ref.at[entry, head], state.peak + jnp.log2(state.total), mask=is_head)
            # The barrier orders all threads' stores, and their loads of q, before the one thread that counts; its
            # addition, acquire and release at the scope of the GPU, orders them for the program that counts last.
            if not interpret:  # which runs one program after the other, and knows no barrier
                plgpu.debug_barrier()
            arrived = plgpu.atomic_add(arrivals_ref, (token, kv_head), jnp.int32(1))

            @pl.when(arrived == count * parts - 1)
            def _merge() -> None:
                first = splits.first[sequence]
                for part in range(parts):
                    of = (token, kv_head, part * shape.rows)
                    _merge_splits(partial_ref, log_weight_ref, out_ref, shape, *of, first=first, count=count)


def _merge_splits(
    partial_ref: Any,
    log_weight_ref: Any,
    out_ref: Any,
    shape: Geometry,
    token: Any,
    kv_head: Any,
    begin_head: int,
    *,
    first: Any,
    count: Any,
) -> None:
    """All splits of one row and one KV head's query heads from ``begin_head`` on, some at a time."""
    group, feature = min(pl.next_power_of_2(shape.group), shape.rows), jnp.arange(shape.width)
    at_once = max(1, MERGED_AT_ONCE // (group * shape.width))
    head, is_head = _heads(kv_head, shape.group, begin_head, group, out_ref.shape[1])
    mask = is_head[:, None] & (feature < shape.head_dim)[None, :]

    def add(i: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        summed, peak, total = carry
        number = i * at_once + jnp.arange(at_once)
        there, entry = number < count, first + number
        log_weight = plgpu.load(
            log_weight_ref.at[entry[:, None], head[None, :]], mask=there[:, None] & is_head[None, :], other=MASKED
        )
        partial = plgpu.load(
            partial_ref.at[entry[:, None, None], head[None, :, None], feature[None, None, :]],
            mask=there[:, None, None] & mask[None],
            other=0.0,
        )
        new_peak = jnp.maximum(peak, log_weight.max(axis=0))
        keep, weight = jnp.exp2(peak - new_peak), jnp.exp2(log_weight - new_peak[None, :])
        summed = summed * keep[:, None] + (partial * weight[:, :, None]).sum(axis=0)
        return summed, new_peak, total * keep + weight.sum(axis=0)

    nothing = (
        jnp.zeros((group, shape.width), jnp.float32),
        jnp.full((group,), MASKED, jnp.float32),
        jnp.zeros((group,), jnp.float32),
    )
    summed, _, total = lax.fori_loop(0, pl.cdiv(count, at_once), add, nothing)
    index = (token, head[:, None], feature[None, :])
    plgpu.store(out_ref.at[index], (summed / total[:, None]).astype(out_ref.dtype), mask=mask)
