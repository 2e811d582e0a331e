"""Batches, checks and timed calls of ``bench.kernels``. Everything is made on the device: a pool has gigabytes."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import (
    AttentionMetadata,
    Backend,
    attention_metadata,
    least_kept_weight,
    ragged_paged_attention,
    reference,
)

PAGE_SIZE = 64


class Shape(NamedTuple):
    """One attention call: sequences of (query tokens, context), and the heads."""

    sequences: tuple[tuple[int, int], ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def decode_only(self) -> bool:
        """Whether every sequence has one query token."""
        return all(queries == 1 for queries, _ in self.sequences)

    @property
    def kv_bytes(self) -> int:
        """Keys and values of bfloat16 that are read at least once."""
        return sum(context for _, context in self.sequences) * self.num_kv_heads * self.head_dim * 4

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products, those above the diagonal left out."""
        pairs = sum(queries * context - queries * (queries - 1) // 2 for queries, context in self.sequences)
        return 4 * pairs * self.num_heads * self.head_dim


def batch(shape: Shape, *, seed: int, dtype: str = "bfloat16") -> tuple[Any, ...]:
    """q, pages, query_starts, context_lens, block_tables. Pages of a sequence lie apart, as after hours of service."""
    rng = np.random.default_rng(seed)
    needed = [-(-context // PAGE_SIZE) for _, context in shape.sequences]
    numbers = rng.permutation(np.arange(1, sum(needed) + 1)).astype(np.int32)
    tables = np.zeros((len(needed), max(needed)), np.int32)
    for row, (begin, count) in enumerate(zip(np.cumsum([0, *needed]), needed, strict=False)):
        tables[row, :count] = numbers[begin : begin + count]
    starts = np.cumsum([0] + [queries for queries, _ in shape.sequences]).astype(np.int32)
    q_key, kv_key = jax.random.split(jax.random.key(seed))
    q = jax.random.normal(q_key, (int(starts[-1]), shape.num_heads, shape.head_dim), dtype)
    pages = (2 * (sum(needed) + 1), PAGE_SIZE, shape.num_kv_heads, shape.head_dim)
    contexts = np.array([context for _, context in shape.sequences], np.int32)
    return q, jax.random.normal(kv_key, pages, dtype), jnp.array(starts), jnp.array(contexts), jnp.array(tables)


def attention(shape: Shape, backend: Backend, *, interpret: bool) -> Callable[..., jax.Array]:
    """A jitted call on q, pages and what :func:`described` made. q is donated, as a step's is in effect: the kernels
    write over it."""

    def attend(q: Any, kv: Any, metadata: AttentionMetadata) -> jax.Array:
        return ragged_paged_attention(q, kv, metadata, layer=0, num_layers=1, backend=backend, interpret=interpret)

    # Kernels in the interpreter are large programs that run once.
    options = {"xla_backend_optimization_level": 0} if interpret else None
    return jax.jit(attend, donate_argnums=0, compiler_options=options)


def described(
    shape: Shape, backend: Backend, arrays: tuple[Any, ...]
) -> tuple[jax.Array, jax.Array, AttentionMetadata]:
    """q, pages and metadata of what :func:`batch` made. The layers of a step share one metadata: its making is no part
    of a kernel's time."""
    q, pages, *ragged = arrays
    make = functools.partial(
        attention_metadata,
        num_tokens=q.shape[0],
        page_size=PAGE_SIZE,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        decode_only=shape.decode_only,
        backend=backend,
    )
    return q, pages, jax.jit(make)(*ragged)


def layers_seconds(shape: Shape, num_layers: int, *, dtype: str, seed: int) -> float:
    """Of the xla backend over all layers, whose pages are too many for the caches, as in a step, which makes
    the metadata once for all of them."""
    q, pages, starts, contexts, tables = batch(shape, seed=seed, dtype=dtype)
    layer_pages = pages.reshape(-1, 1, 2, *pages.shape[1:])
    pool = jnp.broadcast_to(layer_pages, (layer_pages.shape[0], num_layers, *layer_pages.shape[2:]))
    pool = pool.reshape(-1, *pages.shape[1:])
    if dtype == "bfloat16":
        pool = lax.bitcast_convert_type(pool, jnp.uint16)

    @jax.jit
    def attend(q: Any, pool: Any, starts: Any, contexts: Any, tables: Any) -> jax.Array:
        metadata = attention_metadata(
            starts,
            contexts,
            tables,
            num_tokens=q.shape[0],
            page_size=PAGE_SIZE,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            decode_only=shape.decode_only,
            backend="xla",
        )

        def layer(number: Any, q: jax.Array) -> jax.Array:
            return ragged_paged_attention(q, pool, metadata, layer=number, num_layers=num_layers, backend="xla")

        return lax.fori_loop(0, num_layers, layer, q)

    return seconds(attend, (q, pool, starts, contexts, tables), repeats=1)


def selection_seconds(num_rows: int, size: int, deviation: float, backend: Backend, *, seed: int, dry: bool) -> float:
    """Of top-k 50 and top-p 0.9 on rows of normal logits with a deviation."""
    logits = jax.random.normal(jax.random.key(seed), (num_rows, size)) * deviation
    weights = jnp.exp(logits - logits.max(-1, keepdims=True))
    top_k, top_p = jnp.full(num_rows, 50, jnp.int32), jnp.full(num_rows, 0.9, jnp.float32)
    select = functools.partial(least_kept_weight, backend=backend, interpret=dry and backend == "triton")
    return seconds(jax.jit(select), (weights, top_k, top_p), repeats=1 if dry else 20)


def error(shape: Shape, backend: Backend, *, seed: int, interpret: bool) -> float:
    """Norm of the difference from the float64 reference over its norm."""
    arrays = batch(shape, seed=seed)
    want = reference.ragged_paged_attention(*(np.asarray(x) for x in arrays), layer=0, num_layers=1)
    attend = attention(shape, backend, interpret=interpret)
    got = np.asarray(attend(*described(shape, backend, arrays))).astype(np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def seconds(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    repeats: int,
    feed: Callable[[Any], Any] | None = None,
) -> float:
    """Of one call, the best of three runs of ``repeats`` calls that queue up behind each other.

    Arguments:
        feed: of a function that is given its first argument for good, the next call's in what it returned.
    """

    def call(first: Any) -> tuple[Any, Any]:
        result = function(first, *arguments[1:])
        return result, first if feed is None else feed(result)

    result, first = call(arguments[0])
    jax.block_until_ready(result)
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(repeats):
            result, first = call(first)
        jax.block_until_ready(result)
        best = min(best, (time.perf_counter() - began) / repeats)
    return best


def copy_rate(num_bytes: int, *, repeats: int) -> float:
    """Bytes a second that a copy reads and writes: the limit of what is bound by memory."""
    x = jnp.zeros(num_bytes // 4, jnp.float32)
    return 2 * num_bytes / seconds(jax.jit(lambda x: x + 1), (x,), repeats=repeats)


def matmul_rate(size: int, *, repeats: int, dtype: str = "bfloat16") -> float:
    """Multiplications and additions a second of a square product: the limit of what is bound by arithmetic."""
    x = jnp.ones((size, size), dtype)
    return 2 * size**3 / seconds(jax.jit(functools.partial(jnp.dot)), (x, x), repeats=repeats)
