"""The least time that a step can take here: its bytes over the speed of memory or its FLOPs over that of the cores.

Both speeds are measured, by products that XLA runs well: a matrix with one vector for the memory, a matrix with a
matrix for the cores, in float32 and in bfloat16 (which some CPUs multiply twice as fast, and others slowly). Results in
the caches may go faster, and so may integer instructions.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import DTypeLike

from jaxcb.models import ModelSpec
from jaxcb.models.params import Params
from jaxcb.scheduler import StepPlan

_REPEATS = 7
_READ_SHAPE = (65_536, 1_024)
"""256 MiB of float32: no cache holds it."""
_MULTIPLY_SIZE = 1_536


class Speeds(NamedTuple):
    """Of this machine, on all cores that jax uses."""

    bytes_per_s: float
    flops_per_s: float

    @classmethod
    def measure(cls, weights: DTypeLike = jnp.float32) -> Speeds:
        """The best of a few runs of each: what others take from the machine meanwhile is not its speed.

        Arguments:
            weights: bfloat16: the cores' speed is the better one of that and float32.
        """
        product = jax.jit(functools.partial(jnp.matmul, preferred_element_type=jnp.float32))

        def multiply_s(dtype: DTypeLike) -> float:
            square = jnp.ones((_MULTIPLY_SIZE, _MULTIPLY_SIZE), dtype)
            return _best_s(lambda: product(square, square))

        matrix, vector = jnp.ones(_READ_SHAPE), jnp.ones(_READ_SHAPE[1])
        read_s = _best_s(lambda: product(matrix, vector))
        fastest_s = multiply_s(jnp.float32)
        if weights == jnp.bfloat16:
            fastest_s = min(fastest_s, multiply_s(jnp.bfloat16))
        return cls(matrix.nbytes / read_s, 2 * _MULTIPLY_SIZE**3 / fastest_s)

    def least_s(self, work: Work) -> float:
        """Seconds below which no step of this work can come from memory."""
        return max(work.num_bytes / self.bytes_per_s, work.num_flops / self.flops_per_s)


class Work(NamedTuple):
    """What a step must read, and multiply or add."""

    num_bytes: int
    num_flops: int

    @classmethod
    def of(cls, plan: StepPlan, spec: ModelSpec, params: Params, kv_bytes_per_token: int) -> Work:
        """Weights once, the KV of every row once; products, scores and weighted values.

        Arguments:
            kv_bytes_per_token: of all layers.
        """
        head = params.get("lm_head", {"kernel": params["embed"]["embedding"]})
        weights = sum(leaf.nbytes for leaf in jax.tree.leaves((params["layers"], head)))
        head_flops = 2 * spec.vocab_size * spec.hidden_size
        looked_up = spec.vocab_size * spec.hidden_size * (1 + (not spec.tie_word_embeddings))
        layer_flops = 2 * (spec.num_active_params - looked_up)
        pairs = sum(row.num_tokens * row.start + row.num_tokens * (row.num_tokens + 1) // 2 for row in plan.rows)
        positions = sum(row.context_len for row in plan.rows)
        return cls(
            weights + positions * kv_bytes_per_token,
            plan.num_tokens * layer_flops + len(plan.rows) * head_flops + pairs * 4 * spec.q_size * spec.num_layers,
        )


def _best_s(call: Callable[[], jax.Array]) -> float:
    call().block_until_ready()
    times_s = []
    for _ in range(_REPEATS):
        start_s = time.perf_counter()
        call().block_until_ready()
        times_s.append(time.perf_counter() - start_s)
    return min(times_s)
