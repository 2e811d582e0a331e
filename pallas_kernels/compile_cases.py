"""What the compile report compiles: all of the tile tables, every switch of a kernel, and a whole model's steps.

``compile_worker`` compiles them. Functions take arrays, of which the cases give the shapes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import (
    Backend,
    HeadNorm,
    LateNorm,
    QuantizedPages,
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
    write_kv,
)
from pallas_kernels.mosaic import has_api
from pallas_kernels.triton.targets import TARGETS
from pallas_kernels.triton.tiles import shared_memory_bytes, tile_shapes

Shape = jax.ShapeDtypeStruct
HEADS = {64: (9, 3), 80: (32, 32), 96: (24, 8), 128: (32, 8), 256: (8, 1)}
"""Query and KV heads of the models that have heads of that size."""


class Case(NamedTuple):
    """Something to compile.

    Arguments:
        arguments: their shapes.
        num_kernels: Pallas kernels in it.
        promised_bytes: most shared memory that the tile table says of a kernel, by its name.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    num_kernels: int = 1
    promised_bytes: dict[str, int] = {}  # noqa: RUF012  # nobody writes into it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """Attention of 256 tokens and 16 sequences: the kernels of chunks and of decodes.

    Arguments:
        queries: their dtype; None: that of the pages, bfloat16 over 8-bit ones.
        heads: of queries and of KV; None: those of ``HEADS``.
    """

    head_dim: int
    pages: str = "bfloat16"
    queries: str | None = None
    heads: tuple[int, int] | None = None
    page_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    one_path: bool = False
    backend: Backend = "triton"

    @property
    def name(self) -> str:
        """What differs from the rest."""
        said = [
            "mosaic" if self.backend == "mosaic" else "attention",
            f"d{self.head_dim} {self.pages}",
            self.queries and f"{self.queries} queries",
            self.heads and f"{self.heads[0]}:{self.heads[1]}",
            self.page_size != 16 and f"pages of {self.page_size}",
            self.window and "window",
            self.soft_cap and "cap",
            self.sinks and "sinks",
            self.one_path and "one path",
        ]
        return " ".join(str(word) for word in said if word)

    @property
    def numbers(self) -> tuple[str, tuple[int, int]]:
        """The dtype of the queries, and the heads."""
        queries = "bfloat16" if "8" in self.pages else self.pages
        return self.queries or queries, self.heads or HEADS[self.head_dim]

    def case(self, target: str) -> Case:
        """Shapes and the call."""
        queries, (num_heads, num_kv_heads) = self.numbers
        num_seqs, num_tokens = 16, 256

        def attend(q: Any, kv: Any, starts: Any, contexts: Any, tables: Any, sinks: Any) -> Any:
            metadata = attention_metadata(
                starts,
                contexts,
                tables,
                num_tokens=num_tokens,
                page_size=self.page_size,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=self.head_dim,
                window=self.window,
                one_path=self.one_path,
                backend=self.backend,
                target=target,
            )
            options: dict[str, Any] = {"window": self.window, "soft_cap": self.soft_cap, "backend": self.backend}
            return ragged_paged_attention(q, kv, metadata, layer=1, num_layers=2, sinks=sinks, **options)

        pages: Any = Shape((400, self.page_size, num_kv_heads, self.head_dim), self.pages)
        if pages.dtype.itemsize == 1:
            scales: Any = Shape((400, num_kv_heads, self.page_size), jnp.float32)
            pages = QuantizedPages(pages, scales)
        q = Shape((num_tokens, num_heads, self.head_dim), queries)
        batch = (_int32(num_seqs + 1), _int32(num_seqs), _int32(num_seqs, 128))
        arguments = (q, pages, *batch, Shape((num_heads,), jnp.float32) if self.sinks else None)
        return Case(attend, arguments, 1 if self.one_path else 2, self.promised_bytes(target))

    def promised_bytes(self, target: str) -> dict[str, int]:
        """Shared memory of each triton kernel, as the tile table has it."""
        queries, (num_heads, num_kv_heads) = self.numbers
        dtype = queries if "8" in self.pages else jnp.promote_types(queries, self.pages)
        out = {}
        for kernel, decode in (("ragged_paged_attention", False), ("decode_attention", True)):
            tile = tile_shapes(TARGETS[target], self.head_dim, num_heads // num_kv_heads, decode=decode).of(
                dtype, self.pages
            )
            out[f"{kernel}_d{self.head_dim}"] = shared_memory_bytes(
                tile, TARGETS[target], head_dim=self.head_dim, dtype=dtype, kv_dtype=self.pages
            )
        return out


def attention_cases(target: str) -> list[Attention]:
    """Every tile of the tables with every dtype that it serves, and every switch of the kernels at least once."""
    sizes = (64, 128, 256)
    cases = [Attention(head_dim=d, pages=pages) for d in sizes for pages in ("bfloat16", "float16", "float32", "int8")]
    cases += [Attention(head_dim=d) for d in (80, 96)]
    cases += [Attention(head_dim=d, pages=pages, queries="float32") for d in sizes for pages in ("bfloat16", "int8")]
    if TARGETS[target].has_float8:
        cases += [Attention(head_dim=d, pages="float8_e4m3fn") for d in sizes]
        cases += [Attention(head_dim=128, pages="float8_e4m3fn", queries="float32")]
    cases += [Attention(head_dim=d, heads=(71, 1)) for d in sizes]
    cases += [Attention(head_dim=d, heads=(71, 1), pages="float32") for d in sizes]
    cases += [Attention(head_dim=128, heads=(71, 1), pages="int8")]
    cases += [Attention(head_dim=128, page_size=page_size) for page_size in (32, 64, 128)]
    cases += [Attention(head_dim=64, pages="int8", page_size=128), Attention(head_dim=256, page_size=128)]
    cases += [Attention(head_dim=128, window=1024, soft_cap=30.0, sinks=True)]
    cases += [Attention(head_dim=d, one_path=True) for d in sizes]
    cases += [Attention(head_dim=128, one_path=True, pages="float32", window=1024, sinks=True)]
    if _has_mosaic(target):
        for d, page_size in ((64, 16), (128, 16), (128, 128), (256, 64)):
            cases.append(Attention(head_dim=d, page_size=page_size, backend="mosaic"))
        cases.append(Attention(head_dim=128, pages="float16", window=1024, soft_cap=30.0, backend="mosaic"))
    return cases


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
    rows, of_a_row = Shape((256, 128_256), jnp.float32), (_int32(256), Shape((256,), jnp.float32))
    cases["top-k and top-p"] = Case(functools.partial(least_kept_weight, backend="triton"), (rows, *of_a_row))
    for num_tokens, dtype in ((1, "bfloat16"), (2048, "bfloat16"), (32, "float32")):
        cases[f"experts of {num_tokens} {dtype}"] = _experts(num_tokens, dtype)
    return cases


def _experts(num_tokens: int, dtype: str) -> Case:
    """The first product of Qwen3-30B-A3B's experts, of which a token takes 8."""
    x, kernels = Shape((num_tokens, 2048), jnp.dtype(dtype)), Shape((128, 1536, 2048), jnp.dtype(dtype))
    arguments = (x, kernels, _int32(129), _int32(8 * num_tokens))
    return Case(functools.partial(grouped_product, backend="triton"), arguments)


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
    return Case(attend, (*rows, angles, *norms, _int32(num_seqs), _int32(num_seqs, 128)))


def _page_moves(dtype: str) -> Case:
    """Copies inside the pool, out of it and into it."""

    def move(kv: Any, sources: Any, destinations: Any) -> Any:
        kv = copy_pages(kv, sources, destinations, backend="triton")
        taken = gather_pages(kv, sources, backend="triton")
        return scatter_pages(kv, destinations, taken, backend="triton")

    return Case(move, (Shape((64, 4, 2, 16, 8, 128), dtype), _int32(8), _int32(8)), 3)


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
    return Case(write, (*arrays, angles, _int32(num_tokens), *late), 2)


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

    batch = (_int32(num_tokens), _int32(num_tokens), _int32(num_seqs + 1), _int32(num_seqs), _int32(num_seqs, 64))
    return Case(step, (weights, pool, *batch, _int32(num_tokens)))


def step_cases(target: str) -> dict[str, Callable[[], Case]]:
    """What makes each whole step, by name."""
    steps: dict[str, Callable[[], Case]] = {
        "step decode": functools.partial(step_case, target, decode_only=True),
        "step mixed": functools.partial(step_case, target, decode_only=False),
    }
    if _has_mosaic(target):
        steps["step mixed mosaic"] = functools.partial(step_case, target, decode_only=False, backend="mosaic")
    return steps


def _has_mosaic(target: str) -> bool:
    return TARGETS[target].compute_capability == (9, 0) and has_api()


def num_bytes(x: Shape) -> int:
    """Of an array of that shape."""
    return x.size * x.dtype.itemsize


def _int32(*shape: int) -> Shape:
    return Shape(shape, jnp.int32)
