"""Reading blocks of a layer's keys and values out of the pool, and softmax parts that decodes and chunks share."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, Shaped

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

    pages: Shaped[Array, "F page_size K D"]
    layer: int | Int32[Array, ""]
    num_layers: int
    dtype: jnp.dtype

    @property
    def num_heads(self) -> int:
        """K."""
        return self.pages.shape[2]

    def read(
        self, pages: Int32[Array, "*items pages_per_block"], real: Bool[Array, "*items BLOCK"]
    ) -> tuple[Float[Array, "*items BLOCK KD"], Float[Array, "*items BLOCK KD"]]:
        """Keys and values of blocks of pages.

        Values are 0 where not ``real``: a weight of 0 times the NaN that may lie there is NaN.
        """
        page_size = self.pages.shape[1]
        rows = self.pages.reshape(-1, self.pages.shape[2] * self.pages.shape[3])
        first = (pages * (2 * self.num_layers) + 2 * self.layer) * page_size
        index = (first[..., None] + jnp.arange(page_size, dtype=jnp.int32)).reshape(*pages.shape[:-1], BLOCK)
        # Without the barrier XLA's CPU backend computes the index anew for every element it gathers: 7x.
        key_index, value_index = lax.optimization_barrier((index, index + page_size))
        keys, values = self._gather(rows, key_index), self._gather(rows, value_index)
        return keys, jnp.where(real[..., None], values, jnp.zeros((), self.dtype))

    def _gather(self, rows: Shaped[Array, "R KD"], index: Int32[Array, "..."]) -> Float[Array, "... KD"]:
        taken = rows.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)
        if taken.dtype == jnp.uint16:
            taken = lax.bitcast_convert_type(taken, jnp.bfloat16)
        return taken.astype(self.dtype)


def capped(scores: Float[Array, "..."], soft_cap: float | None) -> Float[Array, "..."]:
    """Scores squeezed into (-soft_cap, soft_cap); None leaves them."""
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def normalised(weighted: Float[Array, "... D"], total: Float[Array, "..."]) -> Float[Array, "... D"]:
    """Weighted sum of values over the sum of weights; 0 where nothing was seen."""
    return weighted / jnp.where(total == 0, 1, total)[..., None]
