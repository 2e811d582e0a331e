"""The loop that both triton attention kernels are: one tile of queries over a run of KV positions.

Softmax runs online over blocks of positions, in powers of two (GPUs have no instruction for e^x). Arrays in a kernel
have power-of-two sizes, so some rows and columns are masked.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int32

MASKED = -1e30
"""Score of a position that a query may not see. Finite: a row with nothing to see has no NaN."""
LOG2_E = math.log2(math.e)
TF32_ZEROS = 13
"""Last bits of a float32 that TF32 doesn't have."""


class Softmax(NamedTuple):
    """A tile's state: the values weighed so far, the largest score and the sum of weights of each row, to base 2."""

    weighted: Float[Array, "rows features"]
    peak: Float[Array, " rows"]
    total: Float[Array, " rows"]


class KVRefs(NamedTuple):
    """Where a kernel finds keys and values. Refs of the flat pages, of their scales, the tables, and the layer."""

    values: Any
    scales: Any | None
    tables: Any
    layer: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """What is static in the loop.

    Arguments:
        group: query heads a KV head.
        block: positions of one product.
        dtype: what the products run in.
        precision: that of float32 products: by default they would round their inputs to TF32's 10 bits, and as plain
            float32 they run without tensor cores and spill; three TF32 products come close to float32.
        two_products: the right sides of float32 products are 8-bit numbers, which TF32 holds: the left sides alone are
            split, in what TF32 holds of them and the rest.
    """

    group: int
    rows: int
    block: int
    page_size: int
    head_dim: int
    num_layers: int
    scale: float
    window: int | None
    soft_cap: float | None
    dtype: Any
    precision: lax.Precision | lax.DotAlgorithmPreset | None
    two_products: bool

    @property
    def width(self) -> int:
        """Columns of a tile: the head size, rounded up to a power of two."""
        return pl.next_power_of_2(self.head_dim)

    def dot(self, a: Array, b: Array, contract: tuple[int, int]) -> Float[Array, "rows columns"]:
        """A product that sums over one axis of each, in float32."""
        dimensions = (((contract[0],), (contract[1],)), ((), ()))
        multiply = functools.partial(
            lax.dot_general,
            dimension_numbers=dimensions,
            precision=self.precision,
            preferred_element_type=jnp.float32,
        )
        if not self.two_products:
            return multiply(a, b)
        high, rest = tf32_parts(a)
        return multiply(rest, b) + multiply(high, b)


def tf32_parts(a: Float[Array, "rows columns"]) -> tuple[Float[Array, "rows columns"], Float[Array, "rows columns"]]:
    """What TF32 holds of float32, and the rest, of which it holds all but 2**-21 of the whole."""
    high = lax.bitcast_convert_type(lax.bitcast_convert_type(a, jnp.int32) & -(2**TF32_ZEROS), jnp.float32)
    return high, a - high


def geometry(*, dtype: Any, of_8_bits: bool, interpret: bool, **static: Any) -> Geometry:
    """The geometry of a kernel that multiplies in ``dtype``, over 8-bit pages or others."""
    precision: lax.Precision | lax.DotAlgorithmPreset | None = None
    two_products = of_8_bits and dtype == jnp.float32
    if dtype == jnp.float32:
        on_gpu = lax.DotAlgorithmPreset.TF32_TF32_F32 if two_products else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
        precision = lax.Precision.HIGHEST if interpret else on_gpu
    return Geometry(dtype=dtype, precision=precision, two_products=two_products, **static)


def start(shape: Geometry, sink: Float[Array, " rows"] | None) -> Softmax:
    """The state before any position. A sink is a score with weight 1 and no value."""
    return Softmax(
        weighted=jnp.zeros((shape.rows, shape.width), jnp.float32),
        peak=jnp.full((shape.rows,), MASKED, jnp.float32) if sink is None else sink * LOG2_E,
        total=jnp.full((shape.rows,), 0.0 if sink is None else 1.0, jnp.float32),
    )


def attend(
    q: Float[Array, "rows features"],
    kv: KVRefs,
    state: Softmax,
    shape: Geometry,
    *,
    sequence: Int32[Array, ""],
    kv_head: Int32[Array, ""],
    begin: Int32[Array, ""],
    end: Int32[Array, ""],
    whole_until: Int32[Array, ""] | None,
    query_position: Int32[Array, " rows"],
    oldest: Int32[Array, ""] | None = None,
) -> Softmax:
    """Weigh positions ``begin`` to ``end`` of a sequence. Positions before ``whole_until`` are seen by every row: the
    blocks before it run without masks. None: all blocks run with them. Those before ``oldest`` are not read."""
    step = functools.partial(
        _attend_block,
        q,
        kv,
        shape,
        sequence=sequence,
        kv_head=kv_head,
        begin=begin,
        oldest=oldest,
        query_position=query_position,
    )
    whole: int | Array = 0
    if whole_until is not None:
        whole = jnp.maximum(jnp.minimum(end, whole_until) - begin, 0) // shape.block
        state = lax.fori_loop(0, whole, functools.partial(step, end=None), state)
    return lax.fori_loop(whole, pl.cdiv(end - begin, shape.block), functools.partial(step, end=end), state)


def finish(state: Softmax) -> Float[Array, "rows features"]:
    """The weighted mean of the values; 0 where nothing was seen."""
    return state.weighted / jnp.where(state.total == 0, 1, state.total)[:, None]


def _attend_block(
    q: Float[Array, "rows features"],
    kv: KVRefs,
    shape: Geometry,
    i: Int32[Array, ""],
    state: Softmax,
    *,
    sequence: Int32[Array, ""],
    kv_head: Int32[Array, ""],
    begin: Int32[Array, ""],
    oldest: Int32[Array, ""] | None,
    end: Int32[Array, ""] | None,
    query_position: Int32[Array, " rows"],
) -> Softmax:
    """One block; ``end`` None: all its positions are there and seen by all rows."""
    position = begin + i * shape.block + jnp.arange(shape.block)
    real = None if end is None else position < end
    if real is not None and oldest is not None:
        real &= position >= oldest
    page = _load(kv.tables, (sequence, position // shape.page_size), real)
    keys_page, offset = page * (2 * shape.num_layers) + 2 * kv.layer[0], position % shape.page_size
    keys, key_scales = _rows(kv, shape, keys_page, offset, kv_head, real)
    scores = shape.dot(q, keys, (1, 1))
    if key_scales is not None:
        scores *= key_scales[None, :]
    if shape.soft_cap is None:
        scores *= shape.scale * LOG2_E
    else:
        scores = jnp.tanh(scores * (shape.scale / shape.soft_cap)) * (shape.soft_cap * LOG2_E)
    if real is not None:
        seen = (position[None, :] <= query_position[:, None]) & real[None, :]
        if shape.window is not None:
            seen &= position[None, :] > query_position[:, None] - shape.window
        scores = jnp.where(seen, scores, MASKED)
    peak = jnp.maximum(state.peak, scores.max(axis=1))
    keep = jnp.exp2(state.peak - peak)
    # A row that has seen nothing yet weighs masked positions with 1; `keep` is 0 once it sees something.
    weights = jnp.exp2(scores - peak[:, None])
    values, value_scales = _rows(kv, shape, keys_page + 1, offset, kv_head, real)
    scaled = weights if value_scales is None else weights * value_scales[None, :]
    summed = shape.dot(scaled.astype(shape.dtype), values, (1, 0))
    return Softmax(
        weighted=state.weighted * keep[:, None] + summed, peak=peak, total=state.total * keep + weights.sum(axis=1)
    )


def _rows(
    kv: KVRefs,
    shape: Geometry,
    flat_page: Int32[Array, " block"],
    offset: Int32[Array, " block"],
    kv_head: Int32[Array, ""],
    real: Bool[Array, " block"] | None,
) -> tuple[Float[Array, "block features"], Float[Array, " block"] | None]:
    """Keys or values of some positions, and their scales. 0 where not ``real``."""
    feature = jnp.arange(shape.width)
    mask = None if real is None else real[:, None]
    if shape.width != shape.head_dim:
        in_head = (feature < shape.head_dim)[None, :]
        mask = jnp.broadcast_to(in_head, (shape.block, shape.width)) if mask is None else mask & in_head
    rows = _load(kv.values, (flat_page[:, None], offset[:, None], kv_head, feature[None, :]), mask)
    scales = None if kv.scales is None else _load(kv.scales, (flat_page, kv_head, offset), real)
    return rows.astype(shape.dtype), scales


def _load(ref: Any, index: tuple[Any, ...], mask: Bool[Array, "..."] | None) -> jax.Array:
    if mask is None:
        return plgpu.load(ref.at[index])
    return plgpu.load(ref.at[index], mask=mask, other=jnp.zeros((), ref.dtype))
