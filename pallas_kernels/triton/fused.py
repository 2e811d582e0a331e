"""Triton kernels of :mod:`pallas_kernels.fused`, arguments already checked. All of them are bound by memory."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int32, Shaped

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
        compiler_params=plgpu.CompilerParams(num_warps=8 if x.shape[1] > 2048 else 4, num_stages=1),
        interpret=interpret,
        name="rms_norm",
    )(x, scale)


def _rms_norm(x_ref: Any, scale_ref: Any, out_ref: Any, *, eps: float) -> None:
    row, size = pl.program_id(0), x_ref.shape[1]
    column = jnp.arange(pl.next_power_of_2(size))
    real = column < size
    x = plgpu.load(x_ref.at[row, column], mask=real, other=0.0).astype(jnp.float32)
    scale = plgpu.load(scale_ref.at[column], mask=real, other=0.0).astype(jnp.float32)
    out = x * lax.rsqrt(jnp.sum(x * x) / size + eps) * scale
    plgpu.store(out_ref.at[row, column], out.astype(out_ref.dtype), mask=real)


def silu_mul(gate_up: Float[Array, "T 2F"], *, interpret: bool) -> Float[Array, "T F"]:
    """A program for each row and run of columns."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    return pl.pallas_call(
        _silu_mul,
        grid=(num_tokens, pl.cdiv(size, COLUMNS)),
        out_shape=jax.ShapeDtypeStruct((num_tokens, size), gate_up.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="silu_mul",
    )(gate_up)


def _silu_mul(gate_up_ref: Any, out_ref: Any) -> None:
    row, size = pl.program_id(0), out_ref.shape[1]
    column = pl.program_id(1) * COLUMNS + jnp.arange(COLUMNS)
    real = column < size
    gate = plgpu.load(gate_up_ref.at[row, column], mask=real, other=0.0).astype(jnp.float32)
    up = plgpu.load(gate_up_ref.at[row, size + column], mask=real, other=0.0).astype(jnp.float32)
    out = gate / (1 + jnp.exp(-gate)) * up
    plgpu.store(out_ref.at[row, column], out.astype(out_ref.dtype), mask=real)


def rope_and_write_kv(
    kv_pages: Shaped[Array, "F page_size K D"],
    qkv: Float[Array, "T heads D"],
    cos: Float32[Array, "T D/2"],
    sin: Float32[Array, "T D/2"],
    pages: Int32[Array, " T"],
    offsets: Int32[Array, " T"],
    *,
    layer: int | Int32[Array, ""],
    num_layers: int,
    interpret: bool,
) -> tuple[Float[Array, "T H D"], Shaped[Array, "F page_size K D"]]:
    """A program for each token and run of heads, whether queries, keys or values."""
    num_tokens, all_heads, head_dim = qkv.shape
    num_heads = all_heads - 2 * kv_pages.shape[2]
    keys_page = pages * (2 * num_layers) + 2 * layer
    kv_pages, q = pl.pallas_call(
        functools.partial(_rope_and_write_kv, num_heads=num_heads),
        grid=(num_tokens, pl.cdiv(all_heads, HEADS)),
        out_shape=(
            jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype),
            jax.ShapeDtypeStruct((num_tokens, num_heads, head_dim), qkv.dtype),
        ),
        input_output_aliases={0: 0},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="rope_and_write_kv",
    )(kv_pages, qkv, cos, sin, keys_page, offsets)
    return q, kv_pages


def _rope_and_write_kv(
    _: Any,
    qkv_ref: Any,
    cos_ref: Any,
    sin_ref: Any,
    page_ref: Any,
    offset_ref: Any,
    kv_ref: Any,
    q_ref: Any,
    *,
    num_heads: int,
) -> None:
    token = pl.program_id(0)
    num_kv_heads, head_dim = kv_ref.shape[2:]
    head = pl.program_id(1) * HEADS + jnp.arange(HEADS)
    half = head_dim // 2
    feature = jnp.arange(pl.next_power_of_2(half))
    in_head = (feature < half)[None, :]
    real = (head < num_heads + 2 * num_kv_heads)[:, None] & in_head
    first = plgpu.load(qkv_ref.at[token, head[:, None], feature[None, :]], mask=real, other=0.0)
    second = plgpu.load(qkv_ref.at[token, head[:, None], half + feature[None, :]], mask=real, other=0.0)
    is_value = (head >= num_heads + num_kv_heads)[:, None]
    cos, sin = (
        plgpu.load(ref.at[token, feature], mask=feature < half, other=0.0)[None, :] for ref in (cos_ref, sin_ref)
    )
    a, b = first.astype(jnp.float32), second.astype(jnp.float32)
    halves = (jnp.where(is_value, a, a * cos - b * sin), jnp.where(is_value, b, b * cos + a * sin))

    def store(ref: Any, place: tuple[Any, ...], begin: int, end: int) -> None:
        mine = (head >= begin) & (head < end)
        # Heads that aren't stored point past the last one: interpret mode writes masked elements back as they were.
        row = jnp.where(mine, head - begin, end - begin + jnp.arange(HEADS))[:, None]
        for number, values in enumerate(halves):
            index = (*place, row, number * half + feature[None, :])
            plgpu.store(ref.at[index], values.astype(ref.dtype), mask=mine[:, None] & in_head)

    store(q_ref, (token,), 0, num_heads)
    for kind in (0, 1):
        begin = num_heads + kind * num_kv_heads
        store(kv_ref, (page_ref[token] + kind, offset_ref[token]), begin, begin + num_kv_heads)
