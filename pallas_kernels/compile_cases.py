"""What the compile report compiles: every entry of the tile tables, and a whole model's steps.

Runs in a process of its own (see ``deviceless``), which prints one line of JSON a case:

    python -m pallas_kernels.compile_cases TARGET DUMP_FOLDER PTXAS CASE...
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    grouped_product,
    least_kept_weight,
    ragged_paged_attention,
    rms_norm,
    rope_and_write_kv,
    silu_mul,
    write_kv,
)
from pallas_kernels.deviceless import compile_for
from pallas_kernels.mosaic import has_api
from pallas_kernels.triton.targets import TARGETS

Shape = jax.ShapeDtypeStruct
HEADS = {64: (9, 3), 80: (32, 32), 96: (24, 8), 128: (32, 8), 256: (8, 1)}
"""Query and KV heads of the models that have heads of that size."""
KV_DTYPES = ("bfloat16", "float32", "int8", "float8_e4m3fn")
ARCHITECTURES = {"h200": "sm_90a", "h100": "sm_90a", "a100": "sm_80", "l4": "sm_89"}


def attention_cases(target: str) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Function and arguments of each case, by name. One holds the two kernels of a mixed step."""
    dtypes = [dtype for dtype in KV_DTYPES if "float8" not in dtype or TARGETS[target].compute_capability >= (8, 9)]
    cases = {f"attention d{d} {dtype}": _attention(target, d, dtype) for d in (64, 128, 256) for dtype in dtypes}
    cases |= {f"attention d{d} bfloat16": _attention(target, d, "bfloat16") for d in (80, 96)}
    cases["attention d64 bfloat16 mqa71"] = _attention(target, 64, "bfloat16", heads=(71, 1))
    cases["attention d128 bfloat16 window cap sinks"] = _attention(
        target, 128, "bfloat16", window=1024, soft_cap=30.0, sinks=True
    )
    if _has_mosaic(target):
        for d, page_size in ((64, 16), (128, 16), (128, 128), (256, 64)):
            cases[f"mosaic d{d} pages of {page_size}"] = _attention(
                target, d, "bfloat16", page_size=page_size, backend="mosaic"
            )
    pages = Shape((64, 4, 2, 16, 8, 128), jnp.bfloat16)
    cases["copy_pages"] = (functools.partial(copy_pages, backend="triton"), (pages, _int32(8), _int32(8)))
    cases["fused"] = (_fused, (Shape((512, 16, 8, 128), jnp.bfloat16), Shape((64, 6144), jnp.bfloat16)))
    rows, of_a_row = Shape((256, 128_256), jnp.float32), (_int32(256), Shape((256,), jnp.float32))
    cases["top-k and top-p"] = (functools.partial(least_kept_weight, backend="triton"), (rows, *of_a_row))
    for num_tokens, dtype in ((1, "bfloat16"), (2048, "bfloat16"), (32, "float32")):
        cases[f"experts of {num_tokens} {dtype}"] = _experts(num_tokens, dtype)
    for head_dim in (64, 128, 256):
        cases[f"raw queries d{head_dim}"] = _raw_decodes(target, head_dim)
    return cases


def _experts(num_tokens: int, dtype: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The first product of Qwen3-30B-A3B's experts, of which a token takes 8."""
    x, kernels = Shape((num_tokens, 2048), jnp.dtype(dtype)), Shape((128, 1536, 2048), jnp.dtype(dtype))
    return functools.partial(grouped_product, backend="triton"), (x, kernels, _int32(129), _int32(8 * num_tokens))


def _raw_decodes(target: str, head_dim: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
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
    return attend, (*rows, angles, *norms, _int32(num_seqs), _int32(num_seqs, 128))


def _fused(pages: Any, rows: Any) -> Any:
    """Each fused kernel once, on the same rows."""
    num_tokens, halves = rows.shape[0], pages.shape[-1] // 2
    angles, place = jnp.ones((num_tokens, halves)), jnp.zeros(num_tokens, jnp.int32)
    qkv = rms_norm(rows, jnp.ones(rows.shape[1]), eps=1e-5, backend="triton").reshape(num_tokens, -1, 2 * halves)
    rope = rope_and_write_kv(pages, qkv, angles, angles, place, place, layer=0, num_layers=2, backend="triton")
    added = add_rms_norm(rows, rows, jnp.ones(rows.shape[1]), eps=1e-5, backend="triton")
    return silu_mul(rows, backend="triton"), rope, added


def _attention(
    target: str,
    head_dim: int,
    kv_dtype: str,
    *,
    heads: tuple[int, int] | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
    page_size: int = 16,
    backend: Backend = "triton",
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    num_heads, num_kv_heads = heads or HEADS[head_dim]
    num_seqs, num_tokens = 16, 256

    def attend(q: Any, kv: Any, starts: Any, contexts: Any, tables: Any, sinks: Any) -> Any:
        metadata = attention_metadata(
            starts,
            contexts,
            tables,
            num_tokens=num_tokens,
            page_size=page_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            window=window,
            backend=backend,
            target=target,
        )
        return ragged_paged_attention(
            q, kv, metadata, layer=1, num_layers=2, window=window, soft_cap=soft_cap, sinks=sinks, backend=backend
        )

    pages: Any = Shape((400, page_size, num_kv_heads, head_dim), kv_dtype)
    if pages.dtype.itemsize == 1:
        scales: Any = Shape((400, num_kv_heads, page_size), jnp.float32)
        pages = QuantizedPages(pages, scales)
    q = Shape((num_tokens, num_heads, head_dim), "float32" if kv_dtype == "float32" else "bfloat16")
    batch = (_int32(num_seqs + 1), _int32(num_seqs), _int32(num_seqs, 128))
    return attend, (q, pages, *batch, Shape((num_heads,), jnp.float32) if sinks else None)


def step_case(
    target: str, *, decode_only: bool, num_layers: int = 30, backend: Backend = "triton"
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
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
    return step, (weights, pool, *batch, _int32(num_tokens))


def step_cases(target: str) -> dict[str, Callable[..., Any]]:
    """What makes each whole step, by name."""
    steps: dict[str, Callable[..., Any]] = {
        "step decode": functools.partial(step_case, target, decode_only=True),
        "step mixed": functools.partial(step_case, target, decode_only=False),
    }
    if _has_mosaic(target):
        steps["step mixed mosaic"] = functools.partial(step_case, target, decode_only=False, backend="mosaic")
    return steps


def _has_mosaic(target: str) -> bool:
    return TARGETS[target].compute_capability == (9, 0) and has_api()


def compile_step(name: str, target: str, dump: Path) -> dict[str, Any]:
    """What a whole step became: bytes aliased and temporary, copies as large as a layer's share, CUDA graphs."""
    function, arguments = step_cases(target)[name]()
    pool = arguments[1]
    compiled = compile_for(function, arguments, target, donate=(1,))
    memory, layer_bytes = compiled.memory_analysis(), _bytes(pool) // pool.shape[1]
    text = compiled.as_text()
    assert memory is not None and text is not None, "the compiler reports both"
    copies = [
        shape
        for shape in re.findall(r"= bf16\[([\d,]+)\]\S* copy(?:-start)?\(", text)
        if 2 * functools.reduce(lambda a, b: a * int(b), shape.split(","), 1) >= layer_bytes
    ]
    thunks = max(dump.glob("*thunk_sequence_after_thunk_passes*.txt"), key=lambda path: path.stat().st_mtime)
    return {
        "pool_bytes": _bytes(pool),
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "layer_bytes": layer_bytes,
        "pool_sized_copies": copies,
        "top_thunks": re.findall(r"^\d+: (k\w+)", thunks.read_text(), re.M),
    }


def compile_kernels(name: str, target: str, dump: Path, ptxas: Path) -> dict[str, Any]:
    """Registers, spilled bytes and shared memory of each Pallas kernel of a case."""
    function, arguments = attention_cases(target)[name]
    before = set(dump.glob("*.ptx"))
    compile_for(function, arguments, target)
    kernels: dict[str, Any] = {}
    for path in set(dump.glob("*.ptx")) - before:
        text = path.read_text()
        for entry in re.findall(r"\.entry (\w+)", text):
            if re.match(r"(ragged_paged|decode|copy_pages|rms_norm|add_rms_norm|silu_mul|rope|least)", entry):
                kernels[entry] = assemble(path, ptxas, target) | {
                    "tensor_core": "wgmma" if "wgmma" in text else "mma" if "mma.sync" in text else ""
                }
    if name.startswith("mosaic"):
        return {"kernels": kernels}  # of its own kernel Mosaic leaves no PTX
    if not kernels:
        raise RuntimeError(f"XLA left no PTX of {name} in {dump}")
    return {"kernels": kernels}


def assemble(ptx: Path, ptxas: Path, target: str) -> dict[str, int]:
    """What ``ptxas -v`` says of a kernel. Shared memory that Triton asks for at launch is in the PTX, not in there."""
    command = [str(ptxas), "-v", f"-arch={ARCHITECTURES[target]}", "-o", "/dev/null", str(ptx)]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    text = said.stdout + said.stderr

    def number(pattern: str) -> int:
        return max((int(x) for x in re.findall(pattern, text)), default=0)

    return {
        "registers": number(r"Used (\d+) registers"),
        "spill_bytes": number(r"(\d+) bytes spill stores"),
        "static_shared_bytes": number(r"(\d+) bytes smem"),
    }


def _int32(*shape: int) -> Shape:
    return Shape(shape, jnp.int32)


def _bytes(x: Shape) -> int:
    return x.size * x.dtype.itemsize


def main() -> None:
    target, dump, ptxas = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    for name in sys.argv[4:]:
        began = time.perf_counter()
        try:
            is_step = name in step_cases(target)
            found = compile_step(name, target, dump) if is_step else compile_kernels(name, target, dump, ptxas)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"[:2000]}
        print(json.dumps({"case": name, "seconds": round(time.perf_counter() - began, 1)} | found), flush=True)


if __name__ == "__main__":
    main()
