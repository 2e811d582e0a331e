"""Attention of prompt chunks with Hopper's own instructions: a TMA copy a page, wgmma from shared memory.

A program is one warpgroup with one query tile and KV head. XLA packs the queries of a tile, token x group rows as in
the triton backend, so that one copy brings them; pages arrive by TMA while the block before them is multiplied.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32, Shaped

from pallas_kernels.checks import require
from pallas_kernels.mosaic import BLOCK, DTYPES, HEAD_DIMS, fits, has_api
from pallas_kernels.mosaic import MOSAIC_ROWS as ROWS
from pallas_kernels.pages import KVPages, QuantizedPages
from pallas_kernels.platform import platform
from pallas_kernels.triton import ragged as triton
from pallas_kernels.triton.attend import LOG2_E, MASKED
from pallas_kernels.triton.targets import device_capability
from pallas_kernels.triton.work import QueryTiles, TritonWork

STAGES = 2
"""Blocks in flight. Two of 64 positions at head size 256 are 131 KB of the 227 KB there are."""

COLUMNS = 64
"""Features of the values that are cleared at once: all of them would take as many registers as the result."""

_load: Any = plgpu.load
"""All of a reference. jax 0.11 needs no index for that and 0.12 takes none; 0.10, which wants one, is refused."""


def require_supported(q: Float[Array, "T H D"], kv_pages: KVPages, sinks: Any | None) -> None:
    """Raise ValueError for what only the triton backend can do."""
    require(has_api(), "backend", "xla or triton on jax before 0.11", "'mosaic'")
    hopper = platform() != "gpu" or device_capability() == (9, 0)
    require(hopper, "backend", "xla or triton on a GPU that is no Hopper (compute capability 9.0)", "'mosaic'")
    require(not isinstance(kv_pages, QuantizedPages), "kv_pages", "plain for backend mosaic", "QuantizedPages")
    require(sinks is None, "sinks", "None for backend mosaic", "an array")
    assert not isinstance(kv_pages, QuantizedPages)
    name = jnp.dtype(kv_pages.dtype).name
    require(name in DTYPES, "kv_pages", "bfloat16 or float16 for backend mosaic", name)
    require(q.dtype == kv_pages.dtype, "q", f"of the pages' dtype {name} for backend mosaic", q.dtype)
    _, page_size, _, head_dim = kv_pages.shape
    require(head_dim in HEAD_DIMS, "q", "of head size 64, 128 or 256 for backend mosaic", head_dim)
    expected = f"of pages of at most {BLOCK} at head size 256: 128 exceed the shared memory"
    require(fits(page_size, head_dim), "kv_pages", expected, page_size)


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
    arrivals: Int32[Array, "T K"] | None,
    interpret: bool | Any,
) -> Float[Array, "T H D"]:
    """:func:`pallas_kernels.ragged_paged_attention`, arguments already checked.

    ``interpret``: True, or the parameters of Mosaic's interpreter (race detection), which run the chunks alone.
    """
    assert not isinstance(kv_pages, QuantizedPages), "require_supported comes first"
    if work.tiles is not None:
        chunks = _attend_tiles(
            q,
            kv_pages,
            work.block_tables * (2 * num_layers) + 2 * layer,
            work.tiles,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            interpret=_interpreter() if interpret is True else interpret or None,
        )
        q = _unpack(chunks, q, work.tiles)
    assert work.splits is not None, "one_path is refused for this backend"
    return triton.attend_single_tokens(
        q,
        kv_pages,
        work,
        work.splits,
        layer=layer,
        num_layers=num_layers,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=None,
        arrivals=arrivals,
        interpret=bool(interpret),
    )


def _interpreter() -> Any:
    return plgpu.InterpretGPUParams()  # type: ignore[attr-defined]  # jax before 0.11 is refused


# Under jit layers share one lowering, a second or two each time, which is written in Python.
@functools.partial(jax.jit, static_argnames=("scale", "window", "soft_cap", "interpret"))
def _attend_tiles(
    q: Float[Array, "T H D"],
    kv_pages: Shaped[Array, "F page_size K D"],
    key_pages: Int32[Array, "S P"],
    tiles: QueryTiles,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    interpret: Any | None,
) -> Float[Array, "tiles K ROWS D"]:
    """Each tile's rows; ``key_pages``: flat page of each table entry's keys."""
    (num_tokens, num_heads, head_dim), (_, page_size, num_kv_heads, _) = q.shape, kv_pages.shape
    group, num_tiles = num_heads // num_kv_heads, tiles.sequence.shape[0]
    tokens, block = ROWS // group, max(BLOCK, page_size)
    pages = block // page_size
    sequence = jnp.minimum(tiles.sequence, tiles.contexts.shape[0] - 1)
    num_queries = tiles.starts[sequence + 1] - tiles.starts[sequence]
    first_position = tiles.contexts[sequence] - num_queries + tiles.first
    end = jnp.minimum(tiles.contexts[sequence], first_position + tokens)
    is_idle = tiles.sequence >= tiles.contexts.shape[0] - 1  # the padding too: its context is 0
    end = jnp.where(is_idle, 0, end)
    # A row of zeros for the padding, whole blocks, and pages that exist: no address is taken of what isn't there.
    padded = jnp.pad(key_pages, ((0, 1), (0, -key_pages.shape[1] % pages)))

    row = jnp.arange(ROWS)
    token = tiles.starts[sequence][:, None] + tiles.first[:, None] + jnp.minimum(row // group, tokens - 1)
    by_kv_head = jnp.asarray(q).reshape(num_tokens, num_kv_heads, group, head_dim)
    packed = by_kv_head.at[token[:, None], jnp.arange(num_kv_heads)[:, None], row % group].get(mode="clip")

    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    shared = functools.partial(plgpu.SMEM, dtype=q.dtype, transforms=tiled)
    interpreted = interpret is not None
    options: dict[str, Any] = {"interpret": interpret} if interpreted else {}
    return plgpu.kernel(
        functools.partial(
            _kernel, group=group, block=block, page_size=page_size, scale=scale, window=window, soft_cap=soft_cap
        ),
        out_type=jax.ShapeDtypeStruct(packed.shape, q.dtype),
        grid=(num_tiles, num_kv_heads),
        grid_names=("tile", "head"),
        scratch_types=[
            shared((ROWS, head_dim)),
            shared((STAGES, block, head_dim)),
            shared((STAGES, block, head_dim)),
            # The interpreter's wgmma takes its left side from shared memory only; on the GPU it is in registers.
            shared((ROWS, block)) if interpreted else None,
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=pages, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=pages, num_barriers=STAGES),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **options,
    )(packed, kv_pages, padded, sequence, first_position, end)


def _kernel(
    q_ref: Any,
    kv_ref: Any,
    tables_ref: Any,
    sequence_ref: Any,
    first_ref: Any,
    end_ref: Any,
    out_ref: Any,
    q_shared: Any,
    k_shared: Any,
    v_shared: Any,
    weights_shared: Any | None,
    q_barrier: Any,
    k_barriers: Any,
    v_barriers: Any,
    *,
    group: int,
    block: int,
    page_size: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> None:
    """One query tile and one KV head."""
    tile, head = lax.axis_index("tile"), lax.axis_index("head")
    sequence, first, end = sequence_ref[tile], first_ref[tile], end_ref[tile]
    head_dim, dtype = q_ref.shape[-1], q_shared.dtype
    oldest = jnp.int32(0) if window is None else jnp.maximum(first - (window - 1), 0)
    begin = lax.div(oldest, jnp.int32(block))
    steps = jnp.maximum(lax.div(end + (block - 1), jnp.int32(block)) - begin, 0)
    layout, interpreted = plgpu.Layout.WGMMA, weights_shared is not None

    def fetch(step: Any, slot: Any) -> None:
        for number in range(block // page_size):
            page = tables_ref[sequence, (begin + step) * (block // page_size) + number]
            for kind, shared, barriers in ((0, k_shared, k_barriers), (1, v_shared, v_barriers)):
                place = shared.at[slot, pl.ds(number * page_size, page_size)]
                plgpu.copy_gmem_to_smem(kv_ref.at[page + kind, :, head, :], place, barriers.at[slot])

    plgpu.copy_gmem_to_smem(q_ref.at[tile, head], q_shared, q_barrier)
    for stage in range(STAGES):

        @pl.when(stage < steps)
        def _start(stage: int = stage) -> None:
            fetch(jnp.int32(stage), stage)

    plgpu.barrier_wait(q_barrier)

    def attend_block(step: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        weighted, peak, total = carry
        slot = lax.rem(step, jnp.int32(STAGES))
        base = (begin + step) * block
        plgpu.barrier_wait(k_barriers.at[slot])

        def multiply_keys(accumulator: Any) -> Any:
            plgpu.wgmma(accumulator, q_shared, k_shared.at[slot].transpose((1, 0)))
            return accumulator[...]

        scores = pl.run_scoped(multiply_keys, plgpu.ACC((ROWS, block), jnp.float32))
        if soft_cap is None:
            scores = scores * (scale * LOG2_E)
        else:
            scores = jnp.tanh(scores * (scale / soft_cap)) * (soft_cap * LOG2_E)
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS, block), 0, layout=layout)
        position = plgpu.broadcasted_iota(jnp.int32, (ROWS, block), 1, layout=layout) + base
        query_position = lax.div(row, jnp.int32(group)) + first
        seen = (position <= query_position) & (position < end)
        if window is not None:
            seen = seen & (position > query_position - window)
        scores = jnp.where(seen, scores, MASKED)
        new_peak = jnp.maximum(peak, scores.max(axis=1))
        keep = jnp.exp2(peak - new_peak)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(new_peak, scores.shape, [0]))
        total = total * keep + weights.sum(axis=1)
        weights = weights.astype(dtype)
        plgpu.barrier_wait(v_barriers.at[slot])

        @pl.when((base + block > end) | (base < oldest))
        def _clear() -> None:
            """What lies past the context or before the window may be NaN, and a weight of 0 would not hide it."""
            index = plgpu.broadcasted_iota(jnp.int32, (block, COLUMNS), 0, layout=layout) + base
            real = (index < end) & (index >= oldest)
            for first_column in range(0, head_dim, COLUMNS):
                place = v_shared.at[slot, :, pl.ds(first_column, COLUMNS)]
                values = _load(place, layout=layout).astype(jnp.float32)
                place[...] = jnp.where(real, values, 0.0).astype(dtype)
            plgpu.commit_smem()

        if weights_shared is not None:
            weights_shared[...] = weights
            plgpu.commit_smem()

        def multiply_values(accumulator: Any) -> Any:
            plgpu.wgmma(accumulator, weights if weights_shared is None else weights_shared, v_shared.at[slot])
            return accumulator[...] if interpreted else None

        weighted = weighted * lax.broadcast_in_dim(keep, weighted.shape, [0])
        if interpreted:  # the interpreter has no product into what is there already
            weighted = weighted + pl.run_scoped(multiply_values, plgpu.ACC(weighted.shape, jnp.float32))
        else:  # beside a product of its own the registers don't hold a sum of 256 features
            weighted = pl.run_state(multiply_values)(plgpu.ACC.init(weighted))

        @pl.when(step + STAGES < steps)
        def _next() -> None:
            fetch(step + STAGES, slot)

        return weighted, new_peak, total

    by_row = layout.reduce(1)
    nothing = (
        plgpu.layout_cast(jnp.full((ROWS, head_dim), 0.0, jnp.float32), layout),
        plgpu.layout_cast(jnp.full((ROWS,), MASKED, jnp.float32), by_row),
        plgpu.layout_cast(jnp.full((ROWS,), 0.0, jnp.float32), by_row),
    )
    weighted, _, total = lax.fori_loop(0, steps, attend_block, nothing)
    total = jnp.where(total == 0.0, 1.0, total)
    q_shared[...] = (weighted / lax.broadcast_in_dim(total, weighted.shape, [0])).astype(dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_shared, out_ref.at[tile, head])
    plgpu.wait_smem_to_gmem(0)


def _unpack(
    chunks: Float[Array, "tiles K ROWS D"], q: Float[Array, "T H D"], tiles: QueryTiles
) -> Float[Array, "T H D"]:
    """q with the rows of chunks replaced by what their tiles hold, and those of padding by 0."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = chunks.shape[1]
    group, num_seqs = num_heads // num_kv_heads, tiles.contexts.shape[0] - 1
    tokens = ROWS // group
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    sequence = jnp.searchsorted(tiles.starts[1:], token, side="right", method="compare_all").astype(jnp.int32)
    queries = tiles.starts[1:] - tiles.starts[:-1]
    is_decode = (queries == 1).at[-1].set(False)
    counts = jnp.where(is_decode, 0, -(-queries // tokens))
    inside = token - tiles.starts[sequence]
    tile = (jnp.cumsum(counts) - counts)[sequence] + inside // tokens
    row = (inside % tokens)[:, None] * group + jnp.arange(group)
    rows = chunks.at[tile[:, None, None], jnp.arange(num_kv_heads)[:, None], row[:, None]].get(mode="clip")
    rows = rows.reshape(num_tokens, num_heads, head_dim)
    out = jnp.where(is_decode[sequence][:, None, None], q, rows)
    return jnp.where((sequence == num_seqs)[:, None, None], jnp.zeros((), q.dtype), out)
