"""The norm of decoders."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*batch N"], scale: Float[Array, "N"], eps: float) -> Float[Array, "*batch N"]:
    """Normalise in float32, answer in x's dtype."""
    x32 = x.astype(jnp.float32)
    return (x32 * lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps) * scale).astype(x.dtype)
