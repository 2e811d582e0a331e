"""Triton kernels of :mod:`pallas_kernels.fused`, arguments already checked. All of them are bound by memory."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int32, Shaped

from pallas_kernels.norms import HeadNorm, LateNorm

COLUMNS = 1024
"""Columns that a program of ``silu_mul`` covers: 8 a thread of 4 warps, one 16-byte load of bfloat16."""
HEADS = 16
"""Heads that a program of ``rope_and_write_kv`` covers: many bytes to load at once, few programs for few heads."""


def rms_norm(x: Float[Array, "T E"], scale: Float[Array, " E"], *, eps: float, interpret: bool) -> Float[Array, "T E"]:
    """A program a row."""
    return pl.pallas_call(
        functools.partial(_rms_norm, eps=eps),
        grid=(x.shape[0],),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=_norm_params(x.shape[1]),
        interpret=interpret,
        name="rms_norm",
    )(x, scale)


def add_rms_norm(
    x: Float[Array, "T E"], y: Float[Array, "T E"], scale: Float[Array, " E"], *, eps: float, interpret: bool
) -> tuple[Float[Array, "T E"], Float[Array, "T E"]]:
    """A program a row."""
    total, normed = pl.pallas_call(
        functools.partial(_add_rms_norm, eps=eps),
        grid=(x.shape[0],),
        out_shape=(jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape, x.dtype)),
        compiler_params=_norm_params(x.shape[1]),
        interpret=interpret,
        name="add_rms_norm",
    )(x, y, scale)
    return total, normed


def _norm_params(size: int) -> plgpu.CompilerParams:
    return plgpu.CompilerParams(num_warps=8 if size > 2048 else 4, num_stages=1)


def _rms_norm(x_ref: Any, scale_ref: Any, out_ref: Any, *, eps: float) -> None:
    row, size = pl.program_id(0), x_ref.shape[1]
    column = jnp.arange(pl.next_power_of_2(size))
    x = plgpu.load(x_ref.at[row, column], mask=column < size, other=0.0).astype(jnp.float32)
    _store_normed(x, scale_ref, out_ref, row, column, size, eps)


def _add_rms_norm(x_ref: Any, y_ref: Any, scale_ref: Any, total_ref: Any, out_ref: Any, *, eps: float) -> None:
    row, size = pl.program_id(0), x_ref.shape[1]
    column = jnp.arange(pl.next_power_of_2(size))
    real = column < size
    x, y = (plgpu.load(ref.at[row, column], mask=real, other=0.0).astype(jnp.float32) for ref in (x_ref, y_ref))
    total = (x + y).astype(total_ref.dtype)
    plgpu.store(total_ref.at[row, column], total, mask=real)
    _store_normed(total.astype(jnp.float32), scale_ref, out_ref, row, column, size, eps)


def _store_normed(x: Any, scale_ref: Any, out_ref: Any, row: Any, column: Any, size: int, eps: float) -> None:
    real = column < size
    scale = plgpu.load(scale_ref.at[column], mask=real, other=0.0).astype(jnp.float32)
    out = x * lax.rsqrt(jnp.sum(x * x) / size + eps) * scale
    plgpu.store(out_ref.at[row, column], out.astype(out_ref.dtype), mask=real)


def silu_mul(gate_up: Float[Array, "T 2F"], late_norm: LateNorm | None, *, interpret: bool) -> Float[Array, "T F"]:
    """A program for each row and run of columns."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    late, eps = late_refs(late_norm)
    return pl.pallas_call(
        functools.partial(_silu_mul, eps=eps),
        grid=(num_tokens, pl.cdiv(size, COLUMNS)),
        out_shape=jax.ShapeDtypeStruct((num_tokens, size), gate_up.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="silu_mul",
    )(gate_up, late)


def _silu_mul(gate_up_ref: Any, late: Late | None, out_ref: Any, *, eps: float) -> None:
    row, size = pl.program_id(0), out_ref.shape[1]
    column = pl.program_id(1) * COLUMNS + jnp.arange(COLUMNS)
    real = column < size
    gate, up = (
        plgpu.load(gate_up_ref.at[row, begin + column], mask=real, other=0.0).astype(jnp.float32) for begin in (0, size)
    )
    if late is not None:
        factor = one_over_rms(late.x, row, eps)
        gate, up = (
            finished(values, factor, late.bias, begin + column, real) for values, begin in ((gate, 0), (up, size))
        )
    out = gate / (1 + jnp.exp(-gate)) * up
    plgpu.store(out_ref.at[row, column], out.astype(out_ref.dtype), mask=real)


class Late(NamedTuple):
    """Refs of a late norm: the rows that went into the product, and its bias."""

    x: Any
    bias: Any | None


def late_refs(late_norm: LateNorm | None) -> tuple[Late | None, float]:
    return (None, 0.0) if late_norm is None else (Late(late_norm.x, late_norm.bias), late_norm.eps)


def one_over_rms(x_ref: Any, row: Any, eps: float) -> Any:
    size = x_ref.shape[1]
    column = jnp.arange(pl.next_power_of_2(size))
    x = plgpu.load(x_ref.at[row, column], mask=column < size, other=0.0).astype(jnp.float32)
    return lax.rsqrt(jnp.sum(x * x) / size + eps)


def finished(values: Any, factor: Any, bias_ref: Any | None, column: Any, real: Any) -> Any:
    values = values * factor
    if bias_ref is None:
        return values
    return values + plgpu.load(bias_ref.at[column], mask=real, other=0.0).astype(jnp.float32)


def rope_and_write_kv(
    kv_pages: Shaped[Array, "F page_size K D"],
    qkv: Float[Array, "T heads D"],
    cos: Float32[Array, "T D/2"],
    sin: Float32[Array, "T D/2"],
    pages: Int32[Array, " T"],
    offsets: Int32[Array, " T"],
    head_norm: HeadNorm | None,
    late_norm: LateNorm | None,
    *,
    layer: int | Int32[Array, ""],
    num_layers: int,
    queries: bool,
    interpret: bool,
) -> tuple[Float[Array, "T H D"] | None, Shaped[Array, "F page_size K D"], Int32[Array, "T K"]]:
    """A program for each token and run of heads, whether queries, keys or values; the first of a token clears what
    attention counts in, since a kernel of its own for that would take as long as this one."""
    num_tokens, all_heads, head_dim = qkv.shape
    num_heads = all_heads - 2 * kv_pages.shape[2]
    late, eps = late_refs(late_norm)
    token = Token(pages, offsets, jnp.full((1,), layer, jnp.int32), cos, sin)
    scales = None if head_norm is None else (head_norm.q_scale, head_norm.k_scale)
    kv_pages, arrivals, *q = pl.pallas_call(
        functools.partial(
            _rope_and_write_kv,
            num_heads=num_heads,
            num_layers=num_layers,
            head_eps=0.0 if head_norm is None else head_norm.eps,
            late_eps=eps,
        ),
        grid=(num_tokens, pl.cdiv(all_heads - (0 if queries else num_heads), HEADS)),
        out_shape=(
            jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype),
            jax.ShapeDtypeStruct((num_tokens, kv_pages.shape[2]), jnp.int32),
            *[jax.ShapeDtypeStruct((num_tokens, num_heads, head_dim), qkv.dtype)] * queries,
        ),
        input_output_aliases={0: 0},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="rope_and_write_kv",
    )(kv_pages, qkv, token, scales, late)
    return q[0] if q else None, kv_pages, arrivals


class Token(NamedTuple):
    """Refs of where each token lies, and of its angles."""

    page: Any
    offset: Any
    layer: Any
    cos: Any
    sin: Any


def _rope_and_write_kv(
    _: Any,
    qkv_ref: Any,
    tokens: Token,
    scales: tuple[Any, Any] | None,
    late: Late | None,
    kv_ref: Any,
    arrivals_ref: Any,
    q_ref: Any | None = None,
    *,
    num_heads: int,
    num_layers: int,
    head_eps: float,
    late_eps: float,
) -> None:
    token = pl.program_id(0)
    num_kv_heads, head_dim = kv_ref.shape[2:]
    head = pl.program_id(1) * HEADS + jnp.arange(HEADS)
    head += num_heads if q_ref is None else 0
    half = head_dim // 2
    feature = jnp.arange(pl.next_power_of_2(half))
    in_half = feature < half
    real = (head < num_heads + 2 * num_kv_heads)[:, None] & in_half[None, :]
    features = [number * half + feature[None, :] for number in (0, 1)]
    a, b = (
        plgpu.load(qkv_ref.at[token, head[:, None], column], mask=real, other=0.0).astype(jnp.float32)
        for column in features
    )
    if late is not None:
        factor = one_over_rms(late.x, token, late_eps)
        a, b = (
            finished(values, factor, late.bias, head[:, None] * head_dim + column, real)
            for values, column in zip((a, b), features, strict=True)
        )
    is_value = (head >= num_heads + num_kv_heads)[:, None]
    if scales is not None:
        factor = lax.rsqrt((jnp.sum(a * a, 1) + jnp.sum(b * b, 1)) / head_dim + head_eps)[:, None]
        is_query = (head < num_heads)[:, None]
        of_query, of_key = (_halves(ref, half) for ref in scales)
        a, b = (
            jnp.where(is_value, values, values * factor * jnp.where(is_query, of_query[number], of_key[number]))
            for number, values in enumerate((a, b))
        )
    cos, sin = (
        plgpu.load(ref.at[token, feature], mask=in_half, other=0.0)[None, :] for ref in (tokens.cos, tokens.sin)
    )
    halves = (jnp.where(is_value, a, a * cos - b * sin), jnp.where(is_value, b, b * cos + a * sin))

    def store(ref: Any, place: tuple[Any, ...], begin: int, end: int) -> None:
        mine = (head >= begin) & (head < end)
        # Heads that aren't stored point past the last one: interpret mode writes masked elements back as they were.
        row = jnp.where(mine, head - begin, end - begin + jnp.arange(HEADS))[:, None]
        for column, values in zip(features, halves, strict=True):
            plgpu.store(ref.at[*place, row, column], values.astype(ref.dtype), mask=mine[:, None] & in_half[None, :])

    if q_ref is not None:
        store(q_ref, (token,), 0, num_heads)
    keys_page = tokens.page[token] * (2 * num_layers) + 2 * tokens.layer[0]
    for kind in (0, 1):
        begin = num_heads + kind * num_kv_heads
        store(kv_ref, (keys_page + kind, tokens.offset[token]), begin, begin + num_kv_heads)

    @pl.when(pl.program_id(1) == 0)
    def _clear() -> None:
        kv_head = jnp.arange(pl.next_power_of_2(num_kv_heads))
        plgpu.store(arrivals_ref.at[token, kv_head], jnp.zeros_like(kv_head), mask=kv_head < num_kv_heads)


def _halves(ref: Any, half: int) -> list[Any]:
    """Both halves of a scale."""
    feature = jnp.arange(pl.next_power_of_2(half))
    return [
        plgpu.load(ref.at[number * half + feature], mask=feature < half, other=0.0)[None, :].astype(jnp.float32)
        for number in (0, 1)
    ]
