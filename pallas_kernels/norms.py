"""Norms that a fused kernel does on the way.

A norm before a product can be left to what comes after the product. With the scale w in the weights W, rows x and
r = 1 / rms(x), ``norm(x) @ W.T + b`` is ``r * (x @ (w * W).T) + b``: a :class:`LateNorm` of that product.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float, Float32


class HeadNorm(NamedTuple):
    """RMSNorm of every query and key head before it is rotated, as in Qwen3."""

    q_scale: Float32[Array, " D"]
    k_scale: Float32[Array, " D"]
    eps: float


class LateNorm(NamedTuple):
    """What a product's rows still need: 1 / rms of the rows x that went into it, then the bias of the product."""

    x: Float[Array, "T E"]
    eps: float
    bias: Float[Array, " N"] | None = None
