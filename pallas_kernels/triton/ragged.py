"""The triton backend's ragged paged attention: prompt chunks in query tiles, single tokens by split KV.

Rows of a tile are token x group: all query heads that share a KV head, of neighbouring tokens, meet the same keys in
one product.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.norms import RawQueries
from pallas_kernels.pages import KVPages, QuantizedPages, values_of
from pallas_kernels.triton.attend import Geometry, KVRefs, attend, finish, geometry, start
from pallas_kernels.triton.decode import attend_decodes
from pallas_kernels.triton.offsets import require_offsets_fit
from pallas_kernels.triton.tiles import Tiles, TileShape, require_fits
from pallas_kernels.triton.work import DecodeSplits, QueryTiles, TritonWork


def ragged_paged_attention(
    q: Float[Array, "T H D"],
    kv_pages: KVPages,
    work: TritonWork,
    *,
    layer: int | Int32[Array, ""],
    num_layers: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " H"] | None,
    arrivals: Int32[Array, "T K"] | None,
    interpret: bool,
) -> Float[Array, "T H D"]:
    """:func:`pallas_kernels.ragged_paged_attention`, arguments already checked.

    Chunks first: their kernel leaves the rows of decodes as they are, and the second one finds its queries there.
    """
    options: dict[str, Any] = {
        "layer": layer,
        "num_layers": num_layers,
        "scale": scale,
        "window": window,
        "soft_cap": soft_cap,
        "sinks": sinks,
        "interpret": interpret,
    }
    if work.tiles is not None:
        q = attend_chunks(q, kv_pages, work, work.tiles, **options)
    if work.splits is None:
        return q
    return attend_single_tokens(q, kv_pages, work, work.splits, arrivals=arrivals, **options)


def attend_chunks(
    q: Float[Array, "T H D"],
    kv_pages: KVPages,
    work: TritonWork,
    tiles: QueryTiles,
    *,
    sinks: Float[Array, " H"] | None,
    interpret: bool,
    **options: Any,
) -> Float[Array, "T H D"]:
    """q with the rows of chunks replaced by their attention, and those of padding by 0."""
    kv, shape, tile = _prepare(q, kv_pages, work, work.chunk_tiles, interpret=interpret, **options)
    tile_rows = work.tile_rows
    return pl.pallas_call(
        functools.partial(_kernel, shape=shape, tile_rows=tile_rows, one_path=work.splits is None),
        grid=(tiles.sequence.shape[0], values_of(kv_pages).shape[2], pl.cdiv(tile_rows, tile.rows)),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        input_output_aliases={0: 0},  # a tile reads its rows of q before it writes them: no second buffer
        compiler_params=plgpu.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=interpret,
        name=f"ragged_paged_attention_d{shape.head_dim}",
    )(q, kv, tiles, sinks)


def attend_single_tokens(
    q: Float[Array, "T H D"] | RawQueries,
    kv_pages: KVPages,
    work: TritonWork,
    splits: DecodeSplits,
    *,
    arrivals: Int32[Array, "T K"] | None = None,
    sinks: Float[Array, " H"] | None,
    interpret: bool,
    **options: Any,
) -> Float[Array, "T H D"]:
    """q with the rows of decodes replaced by their attention."""
    kv, shape, tile = _prepare(q, kv_pages, work, work.decode_tiles, interpret=interpret, **options)
    num_kv_heads = values_of(kv_pages).shape[2]
    if arrivals is None:
        arrivals = jnp.zeros((q.shape[0], num_kv_heads), jnp.int32)
    return attend_decodes(q, kv, splits, arrivals, tile, shape, num_kv_heads, sinks=sinks, interpret=interpret)


def _prepare(
    q: Float[Array, "T H D"] | RawQueries,
    kv_pages: KVPages,
    work: TritonWork,
    tiles: Tiles,
    *,
    layer: int | Int32[Array, ""],
    interpret: bool,
    **options: Any,
) -> tuple[KVRefs, Geometry, TileShape]:
    """What a kernel reads from, its static side, and its tile."""
    values = values_of(kv_pages)
    _, page_size, num_kv_heads, head_dim = values.shape
    quantized = isinstance(kv_pages, QuantizedPages)
    # 8-bit numbers are exact in bfloat16: they take the dtype of the queries.
    dtype = q.dtype if quantized else jnp.promote_types(q.dtype, values.dtype)
    tile = tiles.of(dtype, values.dtype)
    require_fits(tile, work.target, head_dim=head_dim, dtype=dtype, kv_dtype=values.dtype)
    require_offsets_fit(values, "kv_pages.values" if quantized else "kv_pages")
    kv = KVRefs(
        values=values,
        scales=kv_pages.scales if isinstance(kv_pages, QuantizedPages) else None,
        tables=work.block_tables,
        layer=jnp.full((1,), layer, jnp.int32),
    )
    shape = geometry(
        group=q.shape[1] // num_kv_heads,
        rows=tile.rows,
        block=tile.block,
        page_size=page_size,
        head_dim=head_dim,
        dtype=dtype,
        interpret=interpret,
        **options,
    )
    return kv, shape, tile


def _kernel(
    q_ref: Any,
    kv: KVRefs,
    tiles: Any,
    sinks_ref: Any | None,
    out_ref: Any,
    *,
    shape: Geometry,
    tile_rows: int,
    one_path: bool,
) -> None:
    """One query tile, or the part of it that a program has room for, and one KV head.

    With ``one_path`` blocks begin at multiples of their length, wherever the tile begins, and all run with masks: a
    row's sums then have the same terms in the same order in any tile, what it may not see adding exact zeros.
    """
    tile, kv_head, begin_row = pl.program_id(0), pl.program_id(1), pl.program_id(2) * shape.rows
    sequence = tiles.sequence[tile]

    @pl.when(sequence < tiles.contexts.shape[0])
    def _attend() -> None:
        row_start, context = tiles.starts[sequence], tiles.contexts[sequence]
        num_queries = tiles.starts[sequence + 1] - row_start
        tokens = tile_rows // shape.group
        row = begin_row + jnp.arange(shape.rows)
        first = tiles.first[tile] + begin_row // shape.group
        past_last = tiles.first[tile] + jnp.minimum(tokens, (begin_row + shape.rows - 1) // shape.group + 1)
        token = tiles.first[tile] + row // shape.group
        head = kv_head * shape.group + row % shape.group
        feature = jnp.arange(shape.width)
        in_tile = (row < tokens * shape.group) & (token < num_queries)
        mask = in_tile[:, None] & (feature < shape.head_dim)[None, :]
        # No two rows share an index, masked ones included: interpret mode writes masked elements back as they were.
        index = ((row_start + token)[:, None], head[:, None], feature[None, :])
        q = plgpu.load(q_ref.at[index], mask=mask, other=0.0).astype(shape.dtype)
        sink = None if sinks_ref is None else plgpu.load(sinks_ref.at[head], mask=in_tile, other=0.0)
        first_query = context - num_queries + first
        oldest = jnp.int32(0) if shape.window is None else jnp.maximum(0, first_query - shape.window + 1)
        state = attend(
            q,
            kv,
            start(shape, sink),
            shape,
            sequence=sequence,
            kv_head=kv_head,
            begin=oldest // shape.block * shape.block if one_path else oldest,
            oldest=oldest if one_path else None,
            end=jnp.where(first < num_queries, context - jnp.maximum(num_queries - past_last, 0), 0),
            whole_until=first_query + 1 if shape.window is None and not one_path else None,
            query_position=context - num_queries + token,
        )
        plgpu.store(out_ref.at[index], finish(state).astype(out_ref.dtype), mask=mask)
