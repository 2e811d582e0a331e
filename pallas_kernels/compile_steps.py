"""Whole steps of a model for the compile report: its layers unrolled, its pages donated."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import Backend, attention_metadata, ragged_paged_attention, write_kv
from pallas_kernels.compile_case import Case, Shape, has_mosaic, int32


def step_case(target: str, *, decode_only: bool, num_layers: int = 30, backend: Backend = "triton") -> Case:
    """A step of a model of SmolLM2-135M's shape on bfloat16, its layers unrolled; the pages are argument 1."""
    hidden, num_heads, num_kv_heads, head_dim, wide, vocabulary, page_size, num_pages = (
        576,
        9,
        3,
        64,
        1536,
        49152,
        16,
        512,
    )
    num_seqs = 64
    num_tokens = num_seqs if decode_only else 512
    bf16 = functools.partial(Shape, dtype=jnp.bfloat16)
    layer = {
        "qkv": bf16(((num_heads + 2 * num_kv_heads) * head_dim, hidden)),
        "o": bf16((hidden, num_heads * head_dim)),
        "gate_up": bf16((2 * wide, hidden)),
        "down": bf16((hidden, wide)),
        "norms": Shape((2, hidden), jnp.float32),
    }
    weights = {"embedding": bf16((vocabulary, hidden)), "layers": [layer] * num_layers}
    pool = bf16((num_pages, num_layers, 2, page_size, num_kv_heads, head_dim))

    def norm(x: Any, scale: Any) -> Any:
        x32 = x.astype(jnp.float32)
        return (x32 * lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + 1e-5) * scale).astype(x.dtype)

    def rotate(x: Any, cos: Any, sin: Any) -> Any:
        a, b = jnp.split(x.astype(jnp.float32), 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)

    def step(
        weights: Any, kv: Any, tokens: Any, positions: Any, starts: Any, contexts: Any, tables: Any, rows: Any
    ) -> Any:
        metadata = attention_metadata(
            starts,
            contexts,
            tables,
            num_tokens=num_tokens,
            page_size=page_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            decode_only=decode_only,
            backend=backend,
            target=target,
        )
        flat = kv.reshape(-1, *kv.shape[3:])
        pages = tables[rows, positions // page_size]
        angles = positions[:, None, None] * 1e4 ** -(jnp.arange(head_dim // 2) / (head_dim // 2))
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        x = weights["embedding"][tokens]
        for number, w in enumerate(weights["layers"]):
            qkv = (norm(x, w["norms"][0]) @ w["qkv"].T).reshape(num_tokens, -1, head_dim)
            q, k, v = jnp.split(qkv, [num_heads, num_heads + num_kv_heads], 1)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            options: dict[str, Any] = {"layer": number, "num_layers": num_layers, "backend": backend}
            flat = write_kv(flat, k, v, pages, positions % page_size, **options)
            attended = ragged_paged_attention(q, flat, metadata, **options)
            x = x + attended.reshape(num_tokens, -1) @ w["o"].T
            gate, up = jnp.split(norm(x, w["norms"][1]) @ w["gate_up"].T, 2, -1)
            x = x + (jax.nn.silu(gate) * up) @ w["down"].T
        return flat.reshape(kv.shape), jnp.argmax(x[starts[1:] - 1] @ weights["embedding"].T, -1)

    batch = (int32(num_tokens), int32(num_tokens), int32(num_seqs + 1), int32(num_seqs), int32(num_seqs, 64))
    return Case(step, (weights, pool, *batch, int32(num_tokens)))


def step_cases(target: str) -> dict[str, Callable[[], Case]]:
    """What makes each whole step, by name."""
    steps: dict[str, Callable[[], Case]] = {
        "step decode": functools.partial(step_case, target, decode_only=True),
        "step mixed": functools.partial(step_case, target, decode_only=False),
    }
    if has_mosaic(target):
        steps["step mixed mosaic"] = functools.partial(step_case, target, decode_only=False, backend="mosaic")
    return steps
