"""The small kernels of a layer that XLA leaves as several: RMSNorm, rotary embedding with the KV write, SiLU x up.

On H200 steps of Llama-3.1-8B they take a layer from 13-17 kernels to 9-10 and remove the traffic between them. The xla
backend of each is the plain expression, which XLA fuses on CPUs by itself.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, Shaped

from pallas_kernels.checks import require, require_array, require_number
from pallas_kernels.kv_write import write_kv
from pallas_kernels.metadata import Backend, chosen_backend
from pallas_kernels.norms import HeadNorm, LateNorm, require_angles, require_head_norm, require_late_norm
from pallas_kernels.pages import PLAIN_DTYPES, QuantizedPages, require_kv_pages
from pallas_kernels.triton import fused as triton


def rms_norm(
    x: Float[Array, "T E"],
    scale: Float[Array, " E"],
    *,
    eps: float,
    backend: Backend | None = None,
    interpret: bool = False,
) -> Float[Array, "T E"]:
    """``x / sqrt(mean(x**2) + eps) * scale`` of each row, computed in float32, in x's dtype.

    Raises:
        ValueError: a shape, dtype or number can't be; the message names the argument.
    """
    backend = chosen_backend(backend)
    require_array(x, "x", (None, None), dtypes=PLAIN_DTYPES)
    require_array(scale, "scale", x.shape[1:], dtypes=PLAIN_DTYPES)
    require_number(eps, "eps", least=0)
    if backend in ("triton", "mosaic"):
        return triton.rms_norm(x, scale, eps=eps, interpret=interpret)
    x32 = x.astype(jnp.float32)
    return (x32 * lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps) * scale).astype(x.dtype)


def add_rms_norm(
    x: Float[Array, "T E"],
    y: Float[Array, "T E"],
    scale: Float[Array, " E"],
    *,
    eps: float,
    backend: Backend | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "T E"], Float[Array, "T E"]]:
    """``x + y``, and :func:`rms_norm` of it.

    Raises:
        ValueError: a shape, dtype or number can't be; the message names the argument.
    """
    backend = chosen_backend(backend)
    require_array(x, "x", (None, None), dtypes=PLAIN_DTYPES)
    require_array(y, "y", x.shape, dtypes=(x.dtype.name,))
    require_array(scale, "scale", x.shape[1:], dtypes=PLAIN_DTYPES)
    require_number(eps, "eps", least=0)
    if backend in ("triton", "mosaic"):
        return triton.add_rms_norm(x, y, scale, eps=eps, interpret=interpret)
    total = x + y
    return total, rms_norm(total, scale, eps=eps, backend=backend)


def silu_mul(
    gate_up: Float[Array, "T 2F"],
    *,
    late_norm: LateNorm | None = None,
    backend: Backend | None = None,
    interpret: bool = False,
) -> Float[Array, "T F"]:
    """``silu(gate) * up`` of rows that hold the gate and, after it, up.

    Raises:
        ValueError: a shape or dtype can't be; the message names the argument.
    """
    backend = chosen_backend(backend)
    require_array(gate_up, "gate_up", (None, None), dtypes=PLAIN_DTYPES)
    require(gate_up.shape[1] % 2 == 0, "gate_up", "of an even number of columns", f"{gate_up.shape[1]}")
    require_late_norm(late_norm, *gate_up.shape)
    if backend in ("triton", "mosaic"):
        return triton.silu_mul(gate_up, late_norm, interpret=interpret)
    gate, up = jnp.split(_finished(gate_up, late_norm), 2, -1)
    return (jax.nn.silu(gate) * up).astype(gate_up.dtype)


class Rotated(NamedTuple):
    """What :func:`rope_and_write_kv` leaves for attention: rotated queries if they were asked for, the pages, and zeros
    to count in (None where the backend needs none)."""

    q: Float[Array, "T H D"] | None
    kv_pages: Shaped[Array, "F page_size K D"]
    arrivals: Int32[Array, "T K"] | None


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
    head_norm: HeadNorm | None = None,
    late_norm: LateNorm | None = None,
    queries: bool = True,
    backend: Backend | None = None,
    interpret: bool = False,
) -> Rotated:
    """Rotate queries and keys, and write keys and values into their pages, reading a token's row once.

    The pairs of a rotation are (i, i + D/2), the order of Hugging Face checkpoints.

    Arguments:
        kv_pages: the pool seen flat, as for :func:`pallas_kernels.write_kv`; in place if donated. Not quantised.
        qkv: the H query heads of each token, then K key heads, then K value heads.
        cos: cosines of each token's angles, scaling included.
        sin: their sines.
        pages: page number of each token; 0 for padding.
        offsets: position inside the page.
        layer: l.
        num_layers: L.
        head_norm: a norm of the heads of queries and keys, before the rotation.
        late_norm: of the product that ``qkv`` is; before the norm of the heads.
        queries: False leaves the queries out, for attention that takes :class:`RawQueries`.
        backend: None chooses by platform.
        interpret: run the triton kernel in Pallas's interpreter, on any platform.

    Raises:
        ValueError: a shape, dtype or number can't be; the message names the argument.
    """
    backend = chosen_backend(backend)
    require(not isinstance(kv_pages, QuantizedPages), "kv_pages", "an array", "QuantizedPages")
    require_kv_pages(kv_pages, layer=layer, num_layers=num_layers, backend=backend)
    num_kv_heads, head_dim = kv_pages.shape[2:]
    require_array(qkv, "qkv", (None, None, head_dim), dtypes=PLAIN_DTYPES)
    num_tokens, num_heads = qkv.shape[0], qkv.shape[1] - 2 * num_kv_heads
    require(
        num_heads > 0 and num_heads % num_kv_heads == 0,
        "qkv",
        f"of 2 * {num_kv_heads} heads and a multiple of {num_kv_heads} query heads",
        f"{qkv.shape[1]} heads",
    )
    require_angles(cos, sin, num_tokens, head_dim)
    for name, index in (("pages", pages), ("offsets", offsets)):
        require_array(index, name, (num_tokens,), dtypes=("int32",))
    require_head_norm(head_norm, head_dim)
    require_late_norm(late_norm, num_tokens, qkv.shape[1] * head_dim)
    if backend in ("triton", "mosaic"):
        rotated = triton.rope_and_write_kv(
            kv_pages,
            qkv,
            cos,
            sin,
            pages,
            offsets,
            head_norm,
            late_norm,
            layer=layer,
            num_layers=num_layers,
            queries=queries,
            interpret=interpret,
        )
        return Rotated(*rotated)
    rows = _finished(qkv.reshape(num_tokens, -1), late_norm).reshape(qkv.shape)
    q, k, v = jnp.split(rows, [num_heads, num_heads + num_kv_heads], 1)
    if head_norm is not None:
        q, k = (
            rows * lax.rsqrt(jnp.mean(rows * rows, -1, keepdims=True) + head_norm.eps) * scale
            for rows, scale in ((q, head_norm.q_scale), (k, head_norm.k_scale))
        )
    k, v = _rotate(k, cos, sin).astype(qkv.dtype), v.astype(qkv.dtype)
    kv_pages = write_kv(kv_pages, k, v, pages, offsets, layer=layer, num_layers=num_layers, backend=backend)
    return Rotated(_rotate(q, cos, sin).astype(qkv.dtype) if queries else None, kv_pages, None)


def _rotate(
    x: Float32[Array, "T heads D"], cos: Float32[Array, "T D/2"], sin: Float32[Array, "T D/2"]
) -> Float32[Array, "T heads D"]:
    first, second = jnp.split(x, 2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def _finished(rows: Float[Array, "T N"], late_norm: LateNorm | None) -> Float32[Array, "T N"]:
    """A product's rows after its late norm, in float32."""
    rows = rows.astype(jnp.float32)
    if late_norm is None:
        return rows
    x = late_norm.x.astype(jnp.float32)
    rows = rows * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + late_norm.eps)
    return rows if late_norm.bias is None else rows + late_norm.bias.astype(jnp.float32)
