"""Attention for the compile report: every tile of the tables with what it serves, and every switch of the kernels."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp

from pallas_kernels import Backend, QuantizedPages, attention_metadata, ragged_paged_attention
from pallas_kernels.compile_case import HEADS, Case, Shape, has_mosaic, int32
from pallas_kernels.triton.targets import TARGETS
from pallas_kernels.triton.tiles import TileShape, shared_memory_bytes, tile_shapes

CHUNKS, DECODES = "ragged_paged_attention", "decode_attention"
"""How the triton kernels are called; the head size follows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """Attention of 256 tokens and 16 sequences: the kernels of chunks and of decodes.

    Arguments:
        queries: their dtype; None: that of the pages, bfloat16 over 8-bit ones.
        heads: of queries and of KV; None: those of ``HEADS``.
        decode_only: the kernel of decodes alone.
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
    decode_only: bool = False
    backend: Backend = "triton"

    @property
    def name(self) -> str:
        """What differs from the rest."""
        kind = "decodes" if self.decode_only else "attention"
        said = [
            "mosaic" if self.backend == "mosaic" else kind,
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

    @property
    def products(self) -> str:
        """The dtype that its products run in."""
        queries = self.numbers[0]
        return queries if "8" in self.pages else jnp.promote_types(queries, self.pages).name

    def tiles(self, target: str) -> dict[str, TileShape]:
        """Its triton kernels, and the tile of each."""
        num_heads, num_kv_heads = self.numbers[1]
        kernels = {CHUNKS: self.backend == "triton" and not self.decode_only, DECODES: not self.one_path}
        table = functools.partial(tile_shapes, TARGETS[target], self.head_dim, num_heads // num_kv_heads)
        return {
            kernel: table(decode=kernel == DECODES).of(self.products)
            for kernel, is_there in kernels.items()
            if is_there
        }

    def case(self, target: str) -> Case:
        """Shapes and the call."""
        queries, (num_heads, num_kv_heads) = self.numbers
        num_seqs = 16
        num_tokens = num_seqs if self.decode_only else 256

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
                decode_only=self.decode_only,
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
        batch = (int32(num_seqs + 1), int32(num_seqs), int32(num_seqs, 128))
        arguments = (q, pages, *batch, Shape((num_heads,), jnp.float32) if self.sinks else None)
        num_kernels = len(self.tiles(target)) + (self.backend == "mosaic")
        return Case(attend, arguments, num_kernels, self.promised_bytes(target))

    def promised_bytes(self, target: str) -> dict[str, int]:
        """Shared memory of each triton kernel, as the tile table has it."""
        asked = functools.partial(
            shared_memory_bytes,
            target=TARGETS[target],
            head_dim=self.head_dim,
            dtype=self.products,
            kv_dtype=self.pages,
        )
        return {f"{kernel}_d{self.head_dim}": asked(tile) for kernel, tile in self.tiles(target).items()}


GROUPS = {24: (64, 128), 40: (64,)}
"""Query heads a KV head for which decodes have a tile of more rows, and the head sizes where they have. For 71 they
have one of yet more, but in float32 that of 40 or 24."""


def attention_cases(target: str) -> list[Attention]:
    """Every tile of the tables over pages of every kind that it serves, and every switch of the kernels at least once.

    float16 compiles to what bfloat16 does, but for the names of the instructions: it is there once for each head size,
    and where 8-bit numbers are converted to it.
    """
    sizes = (64, 128, 256)
    cases = [Attention(head_dim=d, pages=pages) for d in sizes for pages in ("bfloat16", "float16", "float32", "int8")]
    cases += [Attention(head_dim=d) for d in (80, 96)]
    cases += [Attention(head_dim=d, pages=pages, queries="float32") for d in sizes for pages in ("bfloat16", "int8")]
    if TARGETS[target].has_float8:
        cases += [Attention(head_dim=d, pages="float8_e4m3fn") for d in sizes]
        cases += [Attention(head_dim=d, pages="float8_e4m3fn", queries="float32") for d in sizes]
    cases += [Attention(head_dim=d, heads=(71, 1)) for d in sizes]
    cases += [Attention(head_dim=d, heads=(71, 1), pages="float32") for d in sizes]
    for pages in ("int8", "float8_e4m3fn") if TARGETS[target].has_float8 else ("int8",):
        cases += [Attention(head_dim=128, pages=pages, queries="float16")]
        cases += _groups(GROUPS | {71: sizes}, pages=pages) + _groups(GROUPS, pages=pages, queries="float32")
    cases += _groups(GROUPS) + _groups({24: (64,)}, pages="float32") + _groups(GROUPS, queries="float32")
    cases += [Attention(head_dim=128, page_size=page_size) for page_size in (32, 64, 128)]
    cases += [Attention(head_dim=64, pages="int8", page_size=128), Attention(head_dim=256, page_size=128)]
    cases += [Attention(head_dim=128, window=1024, soft_cap=30.0, sinks=True)]
    cases += [Attention(head_dim=d, one_path=True) for d in sizes]
    cases += [Attention(head_dim=128, one_path=True, pages="float32", window=1024, sinks=True)]
    if has_mosaic(target):
        for d, page_size in ((64, 16), (128, 16), (128, 128), (256, 64)):
            cases.append(Attention(head_dim=d, page_size=page_size, backend="mosaic"))
        cases.append(Attention(head_dim=128, pages="float16", window=1024, soft_cap=30.0, backend="mosaic"))
    return cases


def _groups(groups: dict[int, tuple[int, ...]], **options: Any) -> list[Attention]:
    """Decodes with so many query heads a KV head."""
    return [
        Attention(head_dim=d, heads=(group, 1), decode_only=True, **options)
        for group, sizes in groups.items()
        for d in sizes
    ]
