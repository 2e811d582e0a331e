"""The attention kernels on this device: checked against the reference, timed against its limits, tiles swept.

On a GPU nothing more is begun once --budget-s seconds are over (compiling included): what is left out is the rest of
the sweep, then of the shapes. Without a GPU it times the xla backend on the CPU instead, layer after layer of
SmolLM2-135M's shape, float32 and bfloat16. With --dry the GPU's part runs on small shapes in the interpreter, whose
times mean nothing: that shows that the command works.

Decodes are judged by the rate of a copy on the same device, prefills by that of a large bfloat16 product. On a CPU a
case's floor is the longer of two times: its keys and values at the rate of a copy, its arithmetic at the rate of a
float32 product. Three decodes there differ in their contexts alone, to see that the cost follows the sum of the
contexts and not the longest one.
"""

from __future__ import annotations

import datetime
import itertools
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from bench.common import BenchError, describe, machine, make_parser, markdown_table, run, save
from bench.kernel_cases import (
    Shape,
    attention,
    batch,
    copy_rate,
    error,
    layers_seconds,
    matmul_rate,
    seconds,
    selection_seconds,
)
from pallas_kernels import Backend
from pallas_kernels.triton import tiles
from pallas_kernels.triton.targets import default_target
from pallas_kernels.triton.tiles import TileShape

MOST_ERROR = 1e-2
"""Relative, of bfloat16."""
CPU_LAYERS = 30
CPU_DECODES: dict[str, tuple[tuple[int, int], ...]] = {
    "decode 16 of 64 to 2048": tuple((1, 64 + 1984 * i // 15) for i in range(16)),
    "decode 8 of 64, 8 of 2048": ((1, 64), (1, 2048)) * 8,
    "decode 16 of 2048": ((1, 2048),) * 16,
}
"""Of the same longest context, with 16,888 to 32,768 positions in all."""
CPU_BATCHES: dict[str, tuple[tuple[int, int], ...]] = CPU_DECODES | {
    "decode 1 x 1024": ((1, 1024),),
    "decode 32 x 256": ((1, 256),) * 32,
    "prefill 512": ((512, 512),),
    "15 decodes of 64 to 2048, 241 of 512": (*((1, 64 + 1984 * i // 14) for i in range(15)), (241, 512)),
}
SELECTIONS = {"steep": 3.0, "flat": 0.01}
"""Deviations of the logits of rows that are selected from."""
SMALL_HEADS, LARGE_HEADS = (9, 3, 64), (32, 8, 128)


def check_shapes(dry: bool) -> list[Shape]:
    """Mixed batches and decodes that cross tiles, blocks and splits."""
    mixed = ((7, 7), (1, 33), (40, 55), (1, 1), (1, 700))
    decodes = ((1, 1), (1, 64), (1, 65), (1, 1000))
    heads = [(3, 1, 64)] if dry else [SMALL_HEADS, LARGE_HEADS, (8, 1, 256)]
    return [Shape(sequences, *each) for each in heads for sequences in (mixed, decodes)]


def timed_shapes(dry: bool) -> dict[str, Shape]:
    """What the targets are about."""
    if dry:
        return {"decode 2 x 100": Shape(((1, 100),) * 2, 3, 1, 64), "prefill 1 x 64": Shape(((64, 64),), 3, 1, 64)}
    decodes = [(64, 1024), (64, 8192), (256, 1024), (256, 8192), (1, 32768)]
    out = {f"decode {n} x {context}": Shape(((1, context),) * n, *LARGE_HEADS) for n, context in decodes}
    out["decode 255 x 100 and 1 x 32768"] = Shape(((1, 100),) * 255 + ((1, 32768),), *LARGE_HEADS)
    out["decode 64 x 1024, 9/3 x 64"] = Shape(((1, 1024),) * 64, *SMALL_HEADS)
    out |= {f"prefill 1 x {length}": Shape(((length, length),), *LARGE_HEADS) for length in (512, 2048, 4096, 8192)}
    out["mixed 64 x 1024 and 1,984 of 4096"] = Shape(((1, 1024),) * 64 + ((1984, 4096),), *LARGE_HEADS)
    return out


def backends_of(shape: Shape, dry: bool) -> list[Backend]:
    """What may run a shape on this device."""
    hopper = default_target().compute_capability == (9, 0) and tuple(map(int, jax.__version__.split(".")[:2])) >= (
        0,
        11,
    )
    mosaic: list[Backend] = ["mosaic"] if hopper and not shape.decode_only and not dry else []
    return ["triton", *mosaic]


def sweep_tiles(shape: Shape, dry: bool) -> Iterator[TileShape]:
    """Tiles to try for a shape: what is in the table is among them."""
    rows = (16,) if shape.decode_only else (64, 128)
    blocks, stages, warps = ((32, 64, 128), (2, 3, 4), (4, 8)) if not dry else ((64,), (2,), (4,))
    for values in itertools.product(rows, blocks, warps, stages):
        yield TileShape(*values)


def time_shape(
    name: str, shape: Shape, backend: Backend, limits: dict[str, float], dry: bool, seed: int
) -> dict[str, Any]:
    """One row of the result."""
    took = seconds(attention(shape, backend, interpret=dry), batch(shape, seed=seed), repeats=1 if dry else 20)
    share = {
        "of_copy": shape.kv_bytes / took / limits["copy_bytes_per_s"],
        "of_matmul": shape.flops / took / limits["matmul_flops_per_s"],
    }
    return {
        "case": name,
        "backend": backend,
        "us": took * 1e6,
        "gb_per_s": shape.kv_bytes / took / 1e9,
        "tflop_per_s": shape.flops / took / 1e12,
    } | share


def sweep(
    name: str, shape: Shape, limits: dict[str, float], dry: bool, seed: int, until: float
) -> list[dict[str, Any]]:
    """Every tile that compiles, fastest first; those that don't, with the reason."""
    table = (tiles.DECODE_TILES if shape.decode_only else tiles.CHUNK_TILES)[default_target().name]
    key = min(size for size in table if shape.head_dim <= size)
    kept, out = table[key], list[dict[str, Any]]()
    for tile in sweep_tiles(shape, dry):
        if time.perf_counter() >= until:
            break
        table[key] = kept._replace(narrow=tile)
        try:
            out.append({"tile": tile._asdict()} | time_shape(name, shape, "triton", limits, dry, seed))
        except Exception as failure:  # whatever the compiler raises for a tile is a result of the sweep
            out.append({"tile": tile._asdict(), "case": name, "error": f"{failure}"[:200]})
        finally:
            table[key] = kept
    return sorted(out, key=_us)


def _us(row: dict[str, Any]) -> float:
    return row.get("us", float("inf"))


def measure(dry: bool, budget_s: float, seed: int) -> dict[str, Any]:
    """Everything, checks first: a kernel that is wrong is not timed.

    Raises:
        BenchError: a kernel is wrong.
    """
    until = time.perf_counter() + budget_s
    checks: list[dict[str, Any]] = [
        {"case": str(shape), "backend": backend, "error": error(shape, backend, seed=seed, interpret=dry)}
        for shape in check_shapes(dry)
        for backend in backends_of(shape, dry)
    ]
    wrong = [check for check in checks if not check["error"] < MOST_ERROR]
    if wrong:
        raise BenchError(f"a relative error of at most {MOST_ERROR} was expected, got {wrong}")
    sizes = (2**20, 256) if dry else (2**30, 8192)
    limits = {
        "copy_bytes_per_s": copy_rate(sizes[0], repeats=10),
        "matmul_flops_per_s": matmul_rate(sizes[1], repeats=10),
    }
    shapes = timed_shapes(dry)
    timed = [
        time_shape(name, shape, backend, limits, dry, seed)
        for name, shape in shapes.items()
        for backend in backends_of(shape, dry)
        if dry or time.perf_counter() < until
    ]
    selected = select(dry, seed, until)
    swept_names = list(shapes) if dry else ["decode 64 x 1024", "prefill 1 x 4096", "decode 1 x 32768"]
    swept = [sweep(name, shapes[name], limits, dry, seed, until) for name in swept_names]
    return {"checks": checks, "limits": limits, "timed": timed, "sweep": swept, "selection": selected}


def select(dry: bool, seed: int, until: float) -> list[dict[str, Any]]:
    """Top-k with top-p by the kernel and by XLA, microseconds."""
    out: list[dict[str, Any]] = []
    for num_rows, (name, deviation) in itertools.product((2,) if dry else (1, 32, 256), SELECTIONS.items()):
        if not dry and time.perf_counter() >= until:
            break
        size, backends = 3000 if dry else 128_256, list[Backend](("triton", "xla"))
        took = {each: selection_seconds(num_rows, size, deviation, each, seed=seed, dry=dry) for each in backends}
        out.append({"case": f"{num_rows} {name} rows of {size:,}"} | {k: v * 1e6 for k, v in took.items()})
    return out


def measure_cpu(seed: int) -> dict[str, Any]:
    """The xla backend on this CPU: milliseconds of all layers, the floor, and microseconds a position and layer."""
    limits = {
        "copy_bytes_per_s": copy_rate(2**28, repeats=3),
        "float32_flops_per_s": matmul_rate(1024, repeats=3, dtype="float32"),
    }
    rows = []
    for name, sequences in CPU_BATCHES.items():
        shape, positions = Shape(sequences, *SMALL_HEADS), sum(context for _, context in sequences)
        for dtype, scale in (("float32", 2), ("bfloat16", 1)):
            took = layers_seconds(shape, CPU_LAYERS, dtype=dtype, seed=seed)
            times = (
                shape.kv_bytes * scale / limits["copy_bytes_per_s"],
                shape.flops / limits["float32_flops_per_s"],
            )
            row = {"case": name, "dtype": dtype, "positions": positions, "ms": took * 1e3}
            row |= {"floor_ms": max(times) * CPU_LAYERS * 1e3, "us_a_position": took * 1e6 / positions / CPU_LAYERS}
            rows.append(row)
    return {"limits": limits, "cpu": rows}


def cpu_table(result: dict[str, Any]) -> str:
    """The same for people."""
    rows = [
        (
            row["case"],
            row["dtype"],
            f"{row['positions']:,}",
            f"{row['ms']:.1f}",
            f"{row['ms'] / row['floor_ms']:.1f}",
            f"{row['us_a_position']:.3f}",
        )
        for row in result["cpu"]
    ]
    headers = ("attention, 30 layers of 9/3 x 64", "dtype", "positions", "ms", "x floor", "us a position and layer")
    limits = result["limits"]
    return "\n\n".join(
        (
            describe(result["machine"]),
            f"Limits: copy {limits['copy_bytes_per_s'] / 1e9:.1f} GB/s, float32 product "
            f"{limits['float32_flops_per_s'] / 1e9:.0f} GFLOP/s.",
            markdown_table(headers, rows),
        )
    )


def device_facts() -> dict[str, Any]:
    """Card, driver, jax and date."""
    device = jax.devices()[0]
    driver = "none"
    if device.platform == "gpu":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"device": device.device_kind, "driver": driver, "jax": jax.__version__, "date": today}


def tables(result: dict[str, Any]) -> str:
    """The result for people."""
    timed = [
        (
            row["case"],
            row["backend"],
            f"{row['us']:.1f}",
            f"{row['gb_per_s']:.0f}",
            f"{row['of_copy']:.0%}",
            f"{row['tflop_per_s']:.0f}",
            f"{row['of_matmul']:.0%}",
        )
        for row in result["timed"]
    ]
    best = [
        (rows[0]["case"], " ".join(f"{key}={value}" for key, value in rows[0]["tile"].items()), f"{rows[0]['us']:.1f}")
        for rows in result["sweep"]
        if rows and "us" in rows[0]
    ]
    selected = [(row["case"], f"{row['triton']:.1f}", f"{row['xla']:.1f}") for row in result["selection"]]
    rates = result["limits"]
    return "\n\n".join(
        (
            describe(result["device"]),
            f"Limits: copy {rates['copy_bytes_per_s'] / 1e9:.0f} GB/s, "
            f"product {rates['matmul_flops_per_s'] / 1e12:.0f} TFLOP/s, largest error "
            f"{max(check['error'] for check in result['checks']):.1e}.",
            markdown_table(("attention", "backend", "us", "GB/s", "of copy", "TFLOP/s", "of product"), timed),
            markdown_table(("swept", "fastest tile", "us"), best),
            markdown_table(("top-k 50 and top-p 0.9", "triton us", "xla us"), selected),
        )
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("kernels", __doc__, seed=0, seed_help="seed of the batches")
    parser.add_argument("--dry", action="store_true", help="small shapes in the interpreter")
    parser.add_argument(
        "--budget-s", type=float, default=300.0, help="seconds after which no shape or tile is begun; default 300"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there too")
    options = parser.parse_args(arguments)
    facts = machine()
    result: dict[str, Any] = {"machine": facts, "device": device_facts(), "dry": options.dry}
    if options.dry or jax.default_backend() == "gpu":
        result |= measure(options.dry, options.budget_s, options.seed)
        text = tables(result)
    else:
        result |= measure_cpu(options.seed)
        text = cpu_table(result)
    print(text)
    if options.markdown:
        options.markdown.write_text(text + "\n", encoding="utf-8")
    save(options.json, result)


if __name__ == "__main__":
    raise SystemExit(run(main))
