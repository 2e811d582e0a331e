"""Rotary position embedding, with the scalings that Hugging Face configs name: linear, llama3 and yarn."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxcb.models.spec import RopeSpec


def rope_tables(rope: RopeSpec, head_dim: int, positions: Int[Array, "T"]) -> tuple[Float[Array, "T half_D"], ...]:
    """cos and sin of each position's angles, in float32, the scaling's attention factor multiplied in."""
    frequencies, factor = _frequencies(rope, head_dim)
    angles = positions[:, None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(
    x: Float[Array, "T N D"], cos: Float[Array, "T half_D"], sin: Float[Array, "T half_D"]
) -> Float[Array, "T N D"]:
    """Rotate the pairs (i, i + D/2) of every head, the half-and-half order of Hugging Face checkpoints."""
    half = x.shape[-1] // 2
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def _frequencies(rope: RopeSpec, head_dim: int) -> tuple[np.ndarray, float]:
    plain = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    match rope.kind:
        case "linear":
            return plain / rope.factor, 1.0
        case "llama3":
            return _llama3(rope, plain), 1.0
        case "yarn":
            return _yarn(rope, plain, head_dim)
        case _:
            return plain, 1.0


def _llama3(rope: RopeSpec, plain: np.ndarray) -> np.ndarray:
    """Low frequencies are divided by the factor, high ones kept, those between blended (Llama 3.1's model card)."""
    wavelength = 2 * math.pi / plain
    original = rope.original_max_position
    blend = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * plain / rope.factor + blend * plain
    out = np.where(wavelength > original / rope.low_freq_factor, plain / rope.factor, blended)
    return np.where(wavelength < original / rope.high_freq_factor, plain, out)


def _yarn(rope: RopeSpec, plain: np.ndarray, head_dim: int) -> tuple[np.ndarray, float]:
    """YaRN (Peng et al. 2023, section 3.2): interpolate low frequencies, keep high ones, and scale the logits."""

    def dim_of(rotations: float) -> float:
        return head_dim * math.log(rope.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0, 1)
    frequencies = plain / rope.factor * ramp + plain * (1 - ramp)
    factor = rope.attention_factor
    if factor is None:
        factor = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    return frequencies, factor
