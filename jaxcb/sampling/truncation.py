"""Leaves tokens out of the draw: each filter zeroes weights of [S, V], in place of a sort of all V.

Weights are exp(logit - largest) at the row's temperature: in [0, 1], and the likeliest token has exactly 1. A filter
never zeroes that one, so something is left to draw.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import least_kept_weight
from pallas_kernels.xla.threshold import mass_threshold


def at_least(weights: Float[Array, "S V"], threshold: Float[Array, "S"]) -> Float[Array, "S V"]:
    return jnp.where(weights >= threshold[:, None], weights, 0.0)


def keep_min_p(weights: Float[Array, "S V"], min_p: Float[Array, "S"]) -> Float[Array, "S V"]:
    """Tokens at least ``min_p`` times as likely as the likeliest. 0 keeps all (Nguyen et al. 2024)."""
    return at_least(weights, min_p)


def keep_top_k_top_p(
    weights: Float[Array, "S V"], top_k: Int[Array, "S"], top_p: Float[Array, "S"]
) -> Float[Array, "S V"]:
    """The k likeliest tokens, and those that tie with the k-th; of what is left, the likeliest whose share reaches
    ``top_p`` (Holtzman et al. 2020). k = 0 and p = 1 keep all."""
    return at_least(weights, least_kept_weight(weights, top_k, top_p))


def keep_top_n_sigma(logits: Float[Array, "S V"], n: Float[Array, "S"]) -> Float[Array, "S V"]:
    """Logits within n standard deviations of the row's largest; the others become -inf. n <= 0 keeps all."""
    real = jnp.isfinite(logits)
    count = jnp.maximum(real.sum(-1), 1)
    mean = jnp.where(real, logits, 0.0).sum(-1) / count
    deviation = jnp.sqrt(jnp.where(real, (logits - mean[:, None]) ** 2, 0.0).sum(-1) / count)
    lowest = jnp.where(n > 0.0, logits.max(-1) - n * deviation, -jnp.inf)
    return jnp.where(logits >= lowest[:, None], logits, -jnp.inf)


def keep_typical(weights: Float[Array, "S V"], typical_p: Float[Array, "S"]) -> Float[Array, "S V"]:
    """The tokens whose surprise is closest to the entropy, with a share of ``typical_p`` (Meister et al. 2023)."""
    total = weights.sum(-1, keepdims=True)
    surprise = jnp.log(total) - jnp.log(weights)  # inf where the weight is 0
    shares = weights / total
    entropy = jnp.where(weights > 0.0, shares * surprise, 0.0).sum(-1, keepdims=True)
    closeness = jnp.where(weights > 0.0, 1.0 / (1.0 + jnp.abs(surprise - entropy)), 0.0)
    threshold = mass_threshold(closeness, weights, typical_p)
    return jnp.where(closeness >= threshold[:, None], weights, 0.0)


def exclude_top_choices(
    weights: Float[Array, "S V"],
    probability: Float[Array, "S"],
    threshold: Float[Array, "S"],
    uniform: Float[Array, "S"],
) -> Float[Array, "S V"]:
    """XTC: where ``uniform < probability``, of the tokens whose share reaches ``threshold`` the least likely stays.

    Of one such token, or of none, nothing is left out. What was left out before reaches no threshold, not even 0.
    """
    likely = (weights > 0.0) & (weights >= (threshold * weights.sum(-1))[:, None])
    least = jnp.where(likely, weights, jnp.inf).min(-1, keepdims=True)
    acts = (uniform < probability)[:, None]
    return jnp.where(acts & likely & (weights > least), 0.0, weights)
