"""How the decode kernel reads its queries: finished ones, or those of :class:`pallas_kernels.RawQueries`."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.norms import RawQueries
from pallas_kernels.triton.fused import Late, finished, late_refs, one_over_rms


class RawRefs(NamedTuple):
    """What a kernel reads of raw queries."""

    qkv: Any
    cos: Any
    sin: Any
    scale: Any | None
    late: Late | None


class Eps(NamedTuple):
    """Of the norms of raw queries."""

    head: float = 0.0
    late: float = 0.0


def split(q: Any) -> tuple[Any, Eps]:
    """Arrays for a kernel, and the numbers that are static in it."""
    if not isinstance(q, RawQueries):
        return q, Eps()
    late, late_eps = late_refs(q.late_norm)
    scale, head_eps = (None, 0.0) if q.head_norm is None else (q.head_norm.q_scale, q.head_norm.eps)
    return RawRefs(q.qkv, q.cos, q.sin, scale, late), Eps(head_eps, late_eps)


def load_queries(q: Any, eps: Eps, token: Any, head: Any, feature: Any, head_dim: int, is_head: Any) -> Any:
    """Heads ``head`` of a token, [rows, width] in the dtype of q; 0 past a head, and where not ``is_head``."""
    mask = is_head[:, None] & (feature < head_dim)[None, :]
    if not isinstance(q, RawRefs):
        return plgpu.load(q.at[token, head[:, None], feature[None, :]], mask=mask, other=0.0)
    half = head_dim // 2
    in_first = feature < half
    other = jnp.where(in_first, feature + half, feature - half)  # the feature that each is rotated with
    places = (feature, other)
    a, b = (
        plgpu.load(q.qkv.at[token, head[:, None], place[None, :]], mask=mask, other=0.0).astype(jnp.float32)
        for place in places
    )
    if q.late is not None:
        factor, bias = one_over_rms(q.late.x, token, eps.late), q.late.bias
        a, b = (
            finished(values, factor, bias, head[:, None] * head_dim + place[None, :], mask)
            for values, place in zip((a, b), places, strict=True)
        )
    if q.scale is not None:
        factor = lax.rsqrt(jnp.sum(a * a, 1) / head_dim + eps.head)[:, None]
        a, b = (
            values * factor * plgpu.load(q.scale.at[place], mask=feature < head_dim, other=0.0)[None, :]
            for values, place in zip((a, b), places, strict=True)
        )
    angle = jnp.where(in_first, feature, feature - half)
    cos, sin = (plgpu.load(ref.at[token, angle], mask=feature < head_dim, other=0.0) for ref in (q.cos, q.sin))
    return (a * cos[None, :] + b * jnp.where(in_first, -sin, sin)[None, :]).astype(q.qkv.dtype)
