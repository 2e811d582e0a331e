"""Reading blocks of a layer's keys and values out of the pool, and softmax parts that decodes and chunks share."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, Shaped

from pallas_kernels.pages import KVPages, QuantizedPages, from_bits, stored_dtype, values_of
from pallas_kernels.xla.work import BLOCK

MASKED = -1e30
"""Score of a position that a query may not see. Finite: a row with nothing to see has no NaN."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerKV:
    """One layer of the pool.

    Arguments:
        pages: the flat view of the pool.
        layer: which layer.
        num_layers: L.
        dtype: what the products run in.
    """

    pages: KVPages
    layer: int | Int32[Array, ""]
    num_layers: int
    dtype: jnp.dtype

    @property
    def num_heads(self) -> int:
        """K."""
        return values_of(self.pages).shape[2]

    def read(
        self, pages: Int32[Array, "*items pages_per_block"], real: Bool[Array, "*items BLOCK"]
    ) -> tuple[Float[Array, "*items BLOCK KD"], Float[Array, "*items BLOCK KD"]]:
        """Keys and values of blocks of pages.

        Values are 0 where not ``real``: a weight of 0 times the NaN that may lie there is NaN.
        """
        first = pages * (2 * self.num_layers) + 2 * self.layer
        keys, values = (self._gather(first + i) for i in (0, 1))
        return keys, jnp.where(real[..., None], values, jnp.zeros((), self.dtype))

    def _gather(self, flat_pages: Int32[Array, "*items pages_per_block"]) -> Float[Array, "*items BLOCK KD"]:
        pool = values_of(self.pages)
        _, page_size, num_heads, head_dim = pool.shape
        index = flat_pages[..., None] * page_size + jnp.arange(page_size, dtype=jnp.int32)
        # Without the barrier XLA's CPU backend computes the index anew for every element it gathers: 7x.
        index = lax.optimization_barrier(index.reshape(*flat_pages.shape[:-1], BLOCK))
        rows = _take(pool.reshape(-1, num_heads * head_dim), index)
        rows = from_bits(rows, stored_dtype(self.pages)).astype(self.dtype)
        if not isinstance(self.pages, QuantizedPages):
            return rows
        scales = _take(self.pages.scales, flat_pages).swapaxes(-1, -2)  # [*items, pages_per_block, page_size, K]
        scales = scales.reshape(*index.shape, num_heads, 1).astype(self.dtype)
        return (rows.reshape(*index.shape, num_heads, head_dim) * scales).reshape(rows.shape)


def _take(rows: Shaped[Array, "R ..."], index: Int32[Array, "*items"]) -> Shaped[Array, "*items ..."]:
    return rows.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def capped(scores: Float[Array, "..."], soft_cap: float | None) -> Float[Array, "..."]:
    """Scores squeezed into (-soft_cap, soft_cap); None leaves them."""
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def normalised(
    weighted: Float[Array, "... H D"],
    peak: Float[Array, "... H"],
    total: Float[Array, "... H"],
    sinks: Float[Array, " H"] | None,
) -> Float[Array, "... H D"]:
    """Weighted sum of values over the sum of weights, a sink's included; 0 where nothing was seen.

    A sink is a score that takes its share of the weights and has no value.
    """
    if sinks is not None:
        total = total + jnp.exp(sinks - peak)  # infinite where it outweighs all else: 0
    return weighted / jnp.where(total == 0, 1, total)[..., None]
