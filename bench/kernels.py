"""The kernels on this device: checked against the reference, timed against its limits, attention's tiles swept.

A timing of attention is of its kernels: the metadata, which the layers of a step share, is made before. What fails, be
it a check, a backend or a tile, is a row of the result and stops nothing else, and after each stage the files are
written; the status is 1 if a check failed.

On a GPU nothing more is begun once --budget-s seconds are over (compiling included), be it a check, a rate, a shape or
a tile: what is left out is the rest of the sweep, then of the shapes. Kernels that were not checked are not timed.
Without a GPU it times the xla backend on the CPU instead, layer after layer of SmolLM2-135M's shape, float32 and
bfloat16. With --dry the GPU's part runs on small shapes in the interpreter, whose times mean nothing: that shows that
the command works.

Decodes are judged by the rate of a copy on the same device, prefills by that of a large bfloat16 product. On a CPU a
case's floor is the longer of two times: its keys and values at the rate of a copy, its arithmetic at the rate of a
float32 product. Three decodes there differ in their contexts alone, to see that the cost follows the sum of the
contexts and not the longest one.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from bench.common import BenchError, describe, machine, make_parser, markdown_table, run, save
from bench.kernel_cases import (
    Shape,
    attention,
    batch,
    copy_rate,
    described,
    error,
    layers_seconds,
    matmul_rate,
    seconds,
    selection_seconds,
)
from bench.small_kernels import SmallCall, small_calls
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
    arguments = described(shape, backend, batch(shape, seed=seed))
    attend = attention(shape, backend, interpret=dry)
    took = seconds(attend, arguments, repeats=1 if dry else 20, feed=lambda attended: attended)
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
    name: str, shape: Shape, limits: dict[str, float], dry: bool, seed: int, is_time: Callable[[], bool]
) -> list[dict[str, Any]]:
    """Every tile that compiles, fastest first; those that don't, with the reason."""
    table = (tiles.DECODE_TILES if shape.decode_only else tiles.CHUNK_TILES)[default_target().name]
    key = min(size for size in table if shape.head_dim <= size)
    kept, out = table[key], list[dict[str, Any]]()
    for tile in sweep_tiles(shape, dry):
        if not is_time():
            break
        table[key] = kept._replace(narrow=tile)
        found = attempt(time_shape, name, shape, "triton", limits, dry, seed)
        table[key] = kept
        out.append({"tile": tile._asdict(), "case": name} | found)
    return sorted(out, key=_us)


def _us(row: dict[str, Any]) -> float:
    return row.get("us", float("inf"))


def attempt(make: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What ``make`` returns; whatever it raises, the compiler's errors too, as an "error"."""
    try:
        return make(*arguments)
    except Exception as failure:
        return {"error": f"{type(failure).__name__}: {failure}"[:200]}


def measure(dry: bool, budget_s: float, seed: int) -> Iterator[dict[str, Any]]:
    """Stage after stage, each a part of the result. Checks first: a kernel that is wrong is not timed."""
    until = time.perf_counter() + budget_s

    def is_time() -> bool:
        return dry or time.perf_counter() < until

    checks = list(check(dry, seed, is_time))
    yield {"checks": checks}
    right = {(each["kernel"], each["backend"]) for each in checks if is_right(each)}
    right -= {(each["kernel"], each["backend"]) for each in checks if not is_right(each)}
    if not is_time():
        raise BenchError(f"no time was left for rates after {len(checks)} checks, {budget_s:g} s were given")
    sizes = (2**20, 256) if dry else (2**30, 8192)
    limits = {
        "copy_bytes_per_s": copy_rate(sizes[0], repeats=10),
        "matmul_flops_per_s": matmul_rate(sizes[1], repeats=10),
    }
    yield {"limits": limits}
    shapes = timed_shapes(dry)
    yield {
        "timed": [
            {"case": name, "backend": backend} | attempt(time_shape, name, shape, backend, limits, dry, seed)
            for name, shape in shapes.items()
            for backend in backends_of(shape, dry)
            if is_time() and ("attention", backend) in right
        ]
    }
    calls = small_calls(small=dry, seed=seed)
    yield {
        "small": [
            {"case": name, "backend": backend} | attempt(time_small, call, backend, limits, dry)
            for name, call in calls.items()
            for backend in ("triton", "xla")
            if name != "least_kept_weight" and is_time() and (name, backend) in right
        ]
    }
    yield {"selection": select(dry, seed, is_time)}
    swept: list[list[dict[str, Any]]] = []
    for name in list(shapes) if dry else ["decode 64 x 1024", "prefill 1 x 4096", "decode 1 x 32768"]:
        swept.append(sweep(name, shapes[name], limits, dry, seed, is_time))
        yield {"sweep": list(swept)}


def check(dry: bool, seed: int, is_time: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """Every kernel against its reference, while there is time: the relative error of each."""
    for shape in check_shapes(dry):
        for backend in backends_of(shape, dry):
            if not is_time():
                return

            def attended(shape: Shape = shape, backend: Backend = backend) -> dict[str, Any]:
                return {"error": error(shape, backend, seed=seed, interpret=dry)}

            yield {"kernel": "attention", "case": str(shape), "backend": backend} | attempt(attended)
    for name, call in small_calls(small=True, seed=seed).items():
        for backend in ("triton", "xla"):
            if not is_time():
                return

            def called(call: SmallCall = call, backend: Backend = backend) -> dict[str, Any]:
                return {"error": call.error(backend, interpret=dry)}

            yield {"kernel": name, "case": name, "backend": backend} | attempt(called)


def is_right(checked: dict[str, Any]) -> bool:
    """Whether a check ended, and with a small error."""
    return isinstance(checked["error"], float) and checked["error"] < MOST_ERROR


def time_small(call: SmallCall, backend: Backend, limits: dict[str, float], dry: bool) -> dict[str, Any]:
    """Of a kernel beside attention: microseconds, and the share of the copy's rate."""
    took = call.seconds(backend, interpret=dry)
    rate = call.num_bytes / took
    return {"us": took * 1e6, "gb_per_s": rate / 1e9, "of_copy": rate / limits["copy_bytes_per_s"]}


def select(dry: bool, seed: int, is_time: Callable[[], bool]) -> list[dict[str, Any]]:
    """Top-k with top-p by the kernel and by XLA, microseconds."""
    out: list[dict[str, Any]] = []
    for num_rows, (name, deviation) in itertools.product((2,) if dry else (1, 32, 256), SELECTIONS.items()):
        if not is_time():
            break
        size = 3000 if dry else 128_256

        def took(num_rows: int = num_rows, size: int = size, deviation: float = deviation) -> dict[str, Any]:
            backends: tuple[Backend, ...] = ("triton", "xla")
            return {
                each: 1e6 * selection_seconds(num_rows, size, deviation, each, seed=seed, dry=dry) for each in backends
            }

        out.append({"case": f"{num_rows} {name} rows of {size:,}"} | attempt(took))
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
    """The result for people, as far as it is there."""
    parts = [describe(result["device"])]
    checks = result.get("checks", [])
    right = [each["error"] for each in checks if is_right(each)]
    failed = [
        f"{each['kernel']} ({each['backend']}, {each['case']}): {each['error']}"
        for each in checks
        if not is_right(each)
    ]
    parts.append(f"Checks: {len(right)} of {len(checks)} right, largest error {max(right, default=0):.1e}.")
    parts += [f"WRONG: {line}" for line in failed]
    if rates := result.get("limits"):
        copy, product = rates["copy_bytes_per_s"] / 1e9, rates["matmul_flops_per_s"] / 1e12
        parts.append(f"Limits: copy {copy:.0f} GB/s, product {product:.0f} TFLOP/s.")
    columns: dict[str, tuple[str, ...]] = {
        "timed": ("us", "gb_per_s", "of_copy", "tflop_per_s", "of_matmul"),
        "small": ("us", "gb_per_s", "of_copy"),
    }
    titles = {"gb_per_s": "GB/s", "of_copy": "of copy", "tflop_per_s": "TFLOP/s", "of_matmul": "of product"}
    for stage, title in (("timed", "attention"), ("small", "kernel")):
        names = columns[stage]
        rows = [(row["case"], row["backend"], *_cells(row, names)) for row in result.get(stage, [])]
        parts.append(markdown_table((title, "backend", *(titles.get(name, name) for name in names)), rows))
    selected = [(row["case"], *_cells(row, ("triton", "xla"))) for row in result.get("selection", [])]
    parts.append(markdown_table(("top-k 50 and top-p 0.9", "triton us", "xla us"), selected))
    best = [
        (rows[0]["case"], " ".join(f"{key}={value}" for key, value in rows[0]["tile"].items()), f"{rows[0]['us']:.1f}")
        for rows in result.get("sweep", [])
        if rows and "us" in rows[0]
    ]
    parts.append(markdown_table(("swept", "fastest tile", "us"), best))
    return "\n\n".join(parts)


def _cells(row: dict[str, Any], names: Sequence[str]) -> list[str]:
    if "error" in row:
        return [row["error"][:60], *[""] * (len(names) - 1)]
    return [f"{row[name]:.0%}" if name.startswith("of_") else f"{row[name]:.1f}" for name in names]


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
    if not options.dry and jax.default_backend() != "gpu":
        result |= measure_cpu(options.seed)
        write(result, cpu_table(result), options)
        print(cpu_table(result))
        return
    for stage in measure(options.dry, options.budget_s, options.seed):
        result |= stage
        write(result, tables(result), options)  # each stage: a device that is taken away takes no result along
    print(tables(result))
    if wrong := [each for each in result["checks"] if not is_right(each)]:
        raise BenchError(f"a relative error below {MOST_ERROR} was expected, got {wrong}")


def write(result: dict[str, Any], text: str, options: argparse.Namespace) -> None:
    """The files that were asked for."""
    if options.markdown:
        options.markdown.write_text(text + "\n", encoding="utf-8")
    save(options.json, result)


if __name__ == "__main__":
    raise SystemExit(run(main))
