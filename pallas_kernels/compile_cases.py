"""What the compile report compiles: all of the tile tables, every switch of a kernel, and a whole model's steps.

``compile_worker`` compiles them. Functions take arrays, of which the cases give the shapes.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp

from pallas_kernels import (
    HeadNorm,
    LateNorm,
    RawQueries,
    add_rms_norm,
    attention_metadata,
    copy_pages,
    gather_pages,
    grouped_product,
    least_kept_weight,
    ragged_paged_attention,
    rms_norm,
    rope_and_write_kv,
    scatter_pages,
    silu_mul,
)
from pallas_kernels.compile_attention import Attention, attention_cases
from pallas_kernels.compile_case import HEADS, Case, Shape, int32
from pallas_kernels.triton.targets import TARGETS
from pallas_kernels.triton.tiles import PRODUCT_TILES, ProductTile, product_shared_memory_bytes


def kernel_cases(target: str) -> dict[str, Case]:
    """Every case but the whole steps, by name."""
    cases = {each.name: each.case(target) for each in attention_cases(target)}
    for head_dim in (64, 128, 256):
        cases[f"raw queries d{head_dim}"] = _raw_decodes(target, head_dim)
    for dtype in ("bfloat16", "float32", "int8", "float8_e4m3fn"):
        cases[f"pages {dtype}"] = _page_moves(dtype)
    for dtype in ("bfloat16", "float32"):
        for size in (576, 4096, 8192):
            rows = Shape((64, size), dtype)
            cases[f"rows of {size} {dtype}"] = Case(_fused_rows, (rows, Shape((size,), jnp.float32)), 3)
        cases[f"late rows {dtype}"] = _late_rows(dtype)
    for head_dim, norms in ((64, ""), (80, "head"), (128, "head late"), (256, "late bias")):
        cases[f"rope d{head_dim} {norms}".strip()] = _rope(head_dim, norms)
    rows, of_a_row = Shape((256, 128_256), jnp.float32), (int32(256), Shape((256,), jnp.float32))
    cases["top-k and top-p"] = Case(functools.partial(least_kept_weight, backend="triton"), (rows, *of_a_row))
    for num_tokens, dtype in EXPERTS:
        cases[f"experts of {num_tokens} {dtype}"] = _experts(target, num_tokens, dtype)
    return cases


EXPERTS = ((1, "bfloat16"), (2048, "bfloat16"), (32, "float32"))
"""Tokens that products of experts are compiled for, and in what: each tile there is."""


def product_tile(target: str, num_tokens: int, dtype: str) -> ProductTile:
    """The tile of the first product of Qwen3-30B-A3B's 128 experts, of which a token takes 8."""
    return PRODUCT_TILES[target].of(dtype, num_rows=8 * num_tokens, num_groups=128)


def _experts(target: str, num_tokens: int, dtype: str) -> Case:
    x, kernels = Shape((num_tokens, 2048), jnp.dtype(dtype)), Shape((128, 1536, 2048), jnp.dtype(dtype))
    arguments = (x, kernels, int32(129), int32(8 * num_tokens))
    promised = product_shared_memory_bytes(product_tile(target, num_tokens, dtype), TARGETS[target], dtype)
    product = functools.partial(grouped_product, backend="triton")
    return Case(product, arguments, promised_bytes={"grouped_product": promised})


def _raw_decodes(target: str, head_dim: int) -> Case:
    """Decodes that norm and rotate their queries themselves, with every norm there is."""
    num_heads, num_kv_heads = HEADS[head_dim]
    num_seqs, heads = 16, num_heads + 2 * num_kv_heads

    def attend(qkv: Any, pages: Any, angles: Any, x: Any, scale: Any, bias: Any, contexts: Any, tables: Any) -> Any:
        norms = (HeadNorm(scale, scale, 1e-6), LateNorm(x, 1e-5, bias))
        metadata = attention_metadata(
            jnp.arange(num_seqs + 1, dtype=jnp.int32),
            contexts,
            tables,
            num_tokens=num_seqs,
            page_size=16,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            decode_only=True,
            backend="triton",
            target=target,
        )
        q = RawQueries(qkv, num_heads, angles, angles, *norms)
        return ragged_paged_attention(q, pages, metadata, layer=1, num_layers=2, backend="triton")

    bf16 = functools.partial(Shape, dtype=jnp.bfloat16)
    rows = (bf16((num_seqs, heads, head_dim)), bf16((400, 16, num_kv_heads, head_dim)))
    angles = Shape((num_seqs, head_dim // 2), jnp.float32)
    norms = (bf16((num_seqs, 4096)), Shape((head_dim,), jnp.float32), bf16((heads * head_dim,)))
    promised = Attention(head_dim=head_dim, decode_only=True).promised_bytes(target)
    return Case(attend, (*rows, angles, *norms, int32(num_seqs), int32(num_seqs, 128)), promised_bytes=promised)


def _page_moves(dtype: str) -> Case:
    """Copies inside the pool, out of it and into it."""

    def move(kv: Any, sources: Any, destinations: Any) -> Any:
        kv = copy_pages(kv, sources, destinations, backend="triton")
        taken = gather_pages(kv, sources, backend="triton")
        return scatter_pages(kv, destinations, taken, backend="triton")

    return Case(move, (Shape((64, 4, 2, 16, 8, 128), dtype), int32(8), int32(8)), 3)


def _fused_rows(rows: Any, scale: Any) -> Any:
    """Both norms, and SiLU x up."""
    normed = rms_norm(rows, scale, eps=1e-5, backend="triton")
    added = add_rms_norm(rows, rows, scale, eps=1e-5, backend="triton")
    return normed, added, silu_mul(rows, backend="triton")


def _late_rows(dtype: str) -> Case:
    """SiLU x up that finishes a norm, without and with a bias."""

    def both(rows: Any, x: Any, bias: Any) -> Any:
        return [silu_mul(rows, late_norm=LateNorm(x, 1e-5, each), backend="triton") for each in (None, bias)]

    return Case(both, (Shape((64, 6144), dtype), Shape((64, 4096), dtype), Shape((6144,), dtype)), 2)


def _rope(head_dim: int, norms: str) -> Case:
    """RoPE with the KV write, with and without queries. ``norms``: some of "head", "late" and "bias"."""
    num_heads, num_kv_heads = HEADS[head_dim]
    num_tokens, heads = 64, num_heads + 2 * num_kv_heads

    def write(pages: Any, qkv: Any, angles: Any, place: Any, x: Any, scale: Any, bias: Any) -> Any:
        options: dict[str, Any] = {
            "head_norm": HeadNorm(scale, scale, 1e-6) if "head" in norms else None,
            "late_norm": LateNorm(x, 1e-5, bias if "bias" in norms else None) if "late" in norms else None,
            "backend": "triton",
        }
        whole = rope_and_write_kv(pages, qkv, angles, angles, place, place, layer=0, num_layers=2, **options)
        options |= {"layer": 1, "num_layers": 2, "queries": False}
        return whole.q, rope_and_write_kv(whole.kv_pages, qkv, angles, angles, place, place, **options)

    bf16 = functools.partial(Shape, dtype=jnp.bfloat16)
    arrays = (bf16((400, 16, num_kv_heads, head_dim)), bf16((num_tokens, heads, head_dim)))
    angles = Shape((num_tokens, head_dim // 2), jnp.float32)
    late = (bf16((num_tokens, 4096)), Shape((head_dim,), jnp.float32), bf16((heads * head_dim,)))
    return Case(write, (*arrays, angles, int32(num_tokens), *late), 2)
