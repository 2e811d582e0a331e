"""Experts in an MLP's place: which a token takes, and how the rows of tokens become the rows of experts and back.

A token's result is the sum of its experts', weighed by the router's probabilities. No expert has a capacity and no
token is dropped, so that what a token gets doesn't depend on its neighbours. A step is one program: how many rows an
expert has, only the device knows.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int

from jaxcb.models.parallel import TensorParallel
from jaxcb.models.spec import ModelSpec
from pallas_kernels import Groups, group_rows, grouped_product
from pallas_kernels.platform import platform


class Choice(NamedTuple):
    """The experts of T tokens, k of each: R = T k pairs."""

    weights: Float32[Array, "T k"]
    groups: Groups

    @property
    def tokens(self) -> Int[Array, "R"]:
        """Whose row each expert's row is."""
        return self.groups.order // self.weights.shape[1]

    def rows_of(self, x: Float[Array, "T E"]) -> Float[Array, "R E"]:
        """Rows of the tokens, in the order of the experts."""
        return x[self.tokens]

    def mixed(self, rows: Float[Array, "R E"]) -> Float[Array, "T E"]:
        """Rows of the experts, weighed and added up in the order of a token's choice, in float32. What no expert of this
        device has computed counts as 0, whatever it is."""
        count, of_token = self.groups.starts[-1], self.groups.places.reshape(self.weights.shape)

        def part(choice: int) -> Float[Array, "T E"]:
            place = of_token[:, choice]
            row = rows[place].astype(jnp.float32) * self.weights[:, choice, None]
            return jnp.where((place < count)[:, None], row, 0)

        total = part(0)
        for choice in range(1, self.weights.shape[1]):
            total = total + part(choice)
        return total


def scores(x: Float[Array, "T E"], router: Float32[Array, "X E"]) -> Float32[Array, "T X"]:
    """Of every expert for every token, in full float32: on a GPU too, which else rounds to TF32."""
    contract_last = (((1,), (1,)), ((), ()))
    return lax.dot_general(x.astype(jnp.float32), router, contract_last, precision=lax.Precision.HIGHEST)


def choose(
    spec: ModelSpec,
    scored: Float32[Array, "T X"],
    parallel: TensorParallel,
    is_token: Bool[Array, "T"] | None = None,
) -> Choice:
    """The experts that score highest, with their probabilities.

    Arguments:
        is_token: the others are padding, and take none; None: all are.
    """
    weights, experts = lax.top_k(jax.nn.softmax(scored, -1), spec.num_experts_per_token)
    if spec.norm_expert_weights:
        weights = weights / jnp.sum(weights, -1, keepdims=True)
    experts, num_experts = parallel.own_experts(experts, spec.num_experts)
    if is_token is not None:
        experts = jnp.where(is_token[:, None], experts, num_experts)
    return Choice(weights, group_rows(experts, num_experts))


def expert_product(
    x: Float[Array, "N I"],
    kernels: Float[Array, "X O I"],
    starts: Int[Array, "X_plus_1"],
    rows: Int[Array, "R"] | None = None,
) -> Float[Array, "R O"]:
    """As :func:`jaxcb.models.product.product`, of each expert's rows with its own kernel."""
    return grouped_product(x, kernels, starts, rows, dtype=jnp.float32 if platform() == "cpu" else kernels.dtype)
