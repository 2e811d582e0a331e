"""The kernels beside attention, for ``bench.kernels``: a call of each, its reference, and the bytes that it moves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from bench.kernel_cases import seconds
from pallas_kernels import (
    Backend,
    add_rms_norm,
    copy_pages,
    gather_pages,
    grouped_product,
    least_kept_weight,
    reference,
    rms_norm,
    rope_and_write_kv,
    scatter_pages,
    silu_mul,
    write_kv,
)

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
EPS = 1e-5


class SmallCall(NamedTuple):
    """A call of one kernel.

    Arguments:
        run: the public function, with everything but ``backend`` and ``interpret``.
        reference: its twin; takes the same arrays.
        arrays: what both take. Where ``pool_of`` is given the first is a pool, which is donated.
        num_bytes: read and written at least.
        pool_of: the pool in what ``run`` returns, for the next call.
    """

    run: Callable[..., Any]
    reference: Callable[..., Any]
    arrays: tuple[Any, ...]
    num_bytes: int
    pool_of: Callable[[Any], Any] | None = None

    def jitted(self, backend: Backend, *, interpret: bool) -> Callable[..., Any]:
        """The call of a backend; in Pallas's interpreter if so asked."""
        options = {"interpret": True} if interpret and backend == "triton" else {}
        call = functools.partial(self.run, backend=backend, **options)
        return jax.jit(call, donate_argnums=() if self.pool_of is None else 0)

    def error(self, backend: Backend, *, interpret: bool) -> float:
        """The largest of its results' norms of the difference from the reference over the reference's norm."""
        want = jax.tree.leaves(self.reference(*(np.array(x) for x in self.arrays)))
        got = jax.tree.leaves(self.jitted(backend, interpret=interpret)(*map(jnp.array, self.arrays)))
        pairs = zip(got, want, strict=True)
        numbers = [(np.asarray(x).astype(np.float64), np.asarray(y).astype(np.float64)) for x, y in pairs]
        return max(float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in numbers)

    def seconds(self, backend: Backend, *, interpret: bool) -> float:
        """Of one call."""
        arrays = tuple(map(jnp.array, self.arrays))
        call = self.jitted(backend, interpret=interpret)
        return seconds(call, arrays, repeats=1 if interpret else 20, feed=self.pool_of)


def small_calls(*, small: bool, seed: int) -> dict[str, SmallCall]:
    """All of them, on bfloat16 and shapes of Llama-3.1-8B with 256 rows; of a tiny model if ``small``."""
    rng = np.random.default_rng(seed)
    tokens, size, wide, (heads, kv_heads, head_dim), pages = (
        (3, 96, 64, (4, 2, 32), 8) if small else (256, 4096, 14_336, (32, 8, 128), 512)
    )
    page_size, moved = 16, 3 if small else 128

    def rows(*shape: int) -> Any:
        return rng.standard_normal(shape, np.float32).astype(BFLOAT16)

    x, y, scale = rows(tokens, size), rows(tokens, size), rng.standard_normal(size, np.float32)
    gate_up, qkv = rows(tokens, 2 * wide), rows(tokens, heads + 2 * kv_heads, head_dim)
    k, v = rows(tokens, kv_heads, head_dim), rows(tokens, kv_heads, head_dim)
    angles = rng.uniform(0, 100, (tokens, head_dim // 2)).astype(np.float32)
    flat = rows(pages * 2, page_size, kv_heads, head_dim)
    place = rng.choice(np.arange(page_size, pages * page_size), tokens, replace=False).astype(np.int32)
    at = (place // page_size, place % page_size)
    pool = flat.reshape(pages, -1)
    numbers = rng.permutation(np.arange(1, pages)).astype(np.int32)
    sources, destinations = numbers[:moved], numbers[moved : 2 * moved]
    layer: dict[str, Any] = {"layer": 0, "num_layers": 1}
    row, page = x.nbytes, pool.nbytes // pages
    weights = (np.ceil(rng.random((tokens, 1000 if small else 128_256)) * 64) / 64).astype(np.float32)  # sums are exact
    ranks, shares = np.full(tokens, 50, np.int32), np.full(tokens, 0.5, np.float32)

    experts, into = (4, 40) if small else (16, 1536)
    kernels, choices = rows(experts, into, size), tokens * 2
    starts = (np.arange(experts + 1) * choices // experts).astype(np.int32)
    taken = rng.integers(0, tokens, choices).astype(np.int32)

    def product_twin(x: Any, kernels: Any, starts: Any, taken: Any) -> Any:
        return reference.grouped_product(x[taken], kernels, starts)

    def whole(pool: Any) -> Any:
        return pool

    norm = functools.partial(rms_norm, eps=EPS), functools.partial(reference.rms_norm, eps=EPS)
    added = functools.partial(add_rms_norm, eps=EPS), functools.partial(reference.add_rms_norm, eps=EPS)

    def rope(*arrays: Any, backend: Backend, interpret: bool = False) -> Any:
        return rope_and_write_kv(*arrays, layer=0, num_layers=1, backend=backend, interpret=interpret)[:2]

    rope_twin = functools.partial(reference.rope_and_write_kv, **layer)

    def write(*arrays: Any, backend: Backend, interpret: bool = False) -> Any:  # nothing to interpret
        return write_kv(*arrays, layer=0, num_layers=1, backend=backend)

    write_twin = functools.partial(reference.write_kv, **layer)
    return {
        "rms_norm": SmallCall(*norm, (x, scale), 2 * row),
        "add_rms_norm": SmallCall(*added, (x, y, scale), 4 * row),
        "silu_mul": SmallCall(silu_mul, reference.silu_mul, (gate_up,), 3 * gate_up.nbytes // 2),
        "rope_and_write_kv": SmallCall(
            rope, rope_twin, (flat, qkv, np.cos(angles), np.sin(angles), *at), 2 * qkv.nbytes, lambda out: out[1]
        ),
        "write_kv": SmallCall(write, write_twin, (flat, k, v, *at), 4 * k.nbytes, whole),
        "copy_pages": SmallCall(
            copy_pages, reference.copy_pages, (pool, sources, destinations), 2 * moved * page, whole
        ),
        "gather_pages": SmallCall(gather_pages, reference.gather_pages, (pool, sources), 2 * moved * page),
        "scatter_pages": SmallCall(
            scatter_pages, reference.scatter_pages, (pool, destinations, pool[:moved]), 2 * moved * page, whole
        ),
        "grouped_product": SmallCall(
            grouped_product,
            product_twin,
            (x, kernels, starts, taken),
            kernels.nbytes + choices * 2 * (size + into),
        ),
        "least_kept_weight": SmallCall(
            least_kept_weight, reference.least_kept_weight, (weights, ranks, shares), weights.nbytes
        ),
    }
