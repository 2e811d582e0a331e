"""Log-probabilities of given tokens and of the likeliest ones, on the device."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxcb.sampling_params import MAX_LOGPROBS


class RowLogprobs(NamedTuple):
    """A row for each token. K is ``MAX_LOGPROBS`` (or V, if that is less). Where all are wanted, ``top`` is of every id
    in order, and there are no ``top_ids``: they would double what is sent."""

    chosen: Float[Array, "S"]
    ranks: Int[Array, "S"]
    top_ids: Int[Array, "S K"] | None
    top: Float[Array, "S V_or_K"]


def row_logprobs(logits: Float[Array, "S V"], token_ids: Int[Array, "S"], *, every: bool) -> RowLogprobs:
    """``every``: of all ids, in their order, in place of the likeliest."""
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), -1)
    chosen = jnp.take_along_axis(logprobs, token_ids[:, None], 1)
    ranks = jnp.sum(logprobs > chosen, -1) + 1
    if every:
        return RowLogprobs(chosen[:, 0], ranks.astype(jnp.int32), None, logprobs)
    top, top_ids = lax.top_k(logprobs, min(MAX_LOGPROBS, logits.shape[1]))
    return RowLogprobs(chosen[:, 0], ranks.astype(jnp.int32), top_ids.astype(jnp.int32), top)
