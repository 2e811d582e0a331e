"""Experts in an MLP's place: which a token takes, and how the rows of tokens become the rows of experts and back.

A token's result is the sum of its experts', weighed by the router's probabilities. No expert has a capacity and no
token is dropped, so that what a token gets doesn't depend on its neighbours. A step is one program: how many rows an
expert has, only the device knows.

Letters: X experts, k of them for a token, R = T k pairs of a token and one of its experts.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int32

from jaxcb.models.spec import ModelSpec
from pallas_kernels import Groups, grouped_product
from pallas_kernels.platform import platform


class Choice(NamedTuple):
    weights: Float32[Array, "T k"]
    experts: Int32[Array, "T k"]


def expert_scores(x: Float[Array, "T E"], router: Float32[Array, "X E"]) -> Float32[Array, "T X"]:
    """Of every expert for every token, in full float32: a GPU would round to TF32, and a small difference may choose
    another expert."""
    contract_last = (((1,), (1,)), ((), ()))
    return lax.dot_general(x.astype(jnp.float32), router, contract_last, precision=lax.Precision.HIGHEST)


def choose(spec: ModelSpec, scores: Float32[Array, "T X"]) -> Choice:
    """The experts that score highest, with their probabilities."""
    weights, experts = _likeliest(jax.nn.softmax(scores, -1), spec.num_experts_per_token)
    if spec.norm_expert_weights:
        weights = weights / jnp.sum(weights, -1, keepdims=True)
    return Choice(weights, experts)


def _likeliest(probabilities: Float32[Array, "T X"], count: int) -> tuple[Float32[Array, "T k"], Int32[Array, "T k"]]:
    """``lax.top_k``, which on a GPU would be a call of a library that can't be part of a CUDA graph: there every expert
    is compared with every other of the token."""
    if platform() == "cpu":
        weights, experts = lax.top_k(probabilities, count)
        return weights, experts
    number = jnp.arange(probabilities.shape[1], dtype=jnp.int32)
    own, other = probabilities[:, :, None], probabilities[:, None, :]
    before = (other > own) | ((other == own) & (number[None, None, :] < number[None, :, None]))
    rank = jnp.sum(before, -1, dtype=jnp.int32)
    chosen = rank[:, None, :] == jnp.arange(count, dtype=jnp.int32)[None, :, None]
    weights = jnp.sum(jnp.where(chosen, probabilities[:, None, :], 0), -1)
    return weights, jnp.sum(jnp.where(chosen, number, 0), -1, dtype=jnp.int32)


def tokens_of(groups: Groups, choice: Choice) -> Int32[Array, "R"]:
    """Whose row each expert's row is."""
    return groups.order // choice.weights.shape[1]


def by_token(rows: Float[Array, "R E"], groups: Groups, choice: Choice) -> Float[Array, "T k E"]:
    """Rows of the experts as each token has chosen them; 0 what nobody has computed here, whatever stands there."""
    places = groups.places.reshape(choice.weights.shape)
    return jnp.where((places < groups.starts[-1])[..., None], rows[places], 0)


def mixed(rows: Float[Array, "T k E"], weights: Float32[Array, "T k"]) -> Float32[Array, "T E"]:
    """Weighed and added up, from the first choice to the last."""
    first, *others = (rows[:, i].astype(jnp.float32) * weights[:, i, None] for i in range(weights.shape[1]))
    return sum(others, start=first)


def expert_product(
    x: Float[Array, "N I"],
    kernels: Float[Array, "X O I"],
    starts: Int[Array, "X_plus_1"],
    rows: Int[Array, "R"] | None = None,
) -> Float[Array, "R O"]:
    """As :func:`jaxcb.models.product.product`, of each expert's rows of x with its own kernel."""
    return grouped_product(x, kernels, starts, rows, dtype=jnp.float32 if platform() == "cpu" else kernels.dtype)
