"""Proof, without a GPU, that the engine's step moves little more than it must, in few kernels.

    python -m bench.audit --target h200 --model llama-3.1-8b

Compiles the engine's own programs (the forward of each bucket, its greedy sampler, and the one with top-k and top-p)
ahead of time for the GPU, reads what every kernel of the first two reads and writes, and compares the sum with the
least that any step must move: weights, KV read, KV written, logits; and, in a mixed step, activations. Status 1 if a
promise is broken. The compiler comes with jax's CUDA plug-in, which is installed into a folder of its own (0.6 GB,
once).

Bytes are those of HBM if caches keep what one kernel reads twice, and nothing from one kernel to the next.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.audit_cases import MODELS, Case, Floor, floor_of, spec_of
from bench.common import BenchError, Result, make_parser, markdown_table, positive, run, save
from bench.hlo import Kernel, Shape, layers
from jaxcb.models.parallel import spec_of_part
from jaxcb.models.spec import ModelSpec
from jaxcb.step.buckets import Bucket
from pallas_kernels.deviceless import NoPluginError, environment, install_plugin
from pallas_kernels.triton.targets import TARGETS

MOST_OVER_FLOOR = 1.05
MOST_OVER_FLOOR_EXPERTS = 1.35
"""Of a model with experts: small kernels choose them, and with whole ones on each of several GPUs arrays of rows have
places for those of the others, which are read with them (1.30 of a mixed step on four)."""
MOST_KERNELS = {False: 9, True: 7}
"""Of a layer, by ``fast_norm``."""
MOST_KERNELS_CUT = 11
"""Of a layer of a model that is cut over several GPUs: two all-reduces more."""
MOST_KERNELS_EXPERTS = 27
"""Of a layer with experts. Most are XLA's, and small: they choose experts, and sort the rows of a step by them."""
ANCHOR = "rope_and_write_kv"
"""A kernel that every layer has once."""


@dataclasses.dataclass(frozen=True)
class Audited:
    """One step, compiled."""

    spec: ModelSpec
    case: Case
    target: str
    fast_norm: bool
    forward: list[Kernel]
    sampler: list[Kernel]
    facts: Mapping[str, Any]
    num_devices: int = 1
    """``spec`` is what each computes, its part of the vocabulary included."""
    expert_parallel: bool = False

    @property
    def floor(self) -> Floor:
        """Of one device."""
        return floor_of(
            self.spec,
            self.case,
            fast_norm=self.fast_norm,
            num_devices=self.num_devices,
            expert_parallel=self.expert_parallel,
        )

    @property
    def sums(self) -> int:
        """All-reduces of the forward."""
        return sum(kernel.name in ("all-reduce", "all-reduce-start") for kernel in self.forward)

    @property
    def read(self) -> float:
        return sum(kernel.read for kernel in (*self.forward, *self.sampler))

    @property
    def written(self) -> float:
        return sum(kernel.written for kernel in (*self.forward, *self.sampler))

    @property
    def over_floor(self) -> float:
        return (self.read + self.written) / self.floor.total

    @functools.cached_property
    def layers(self) -> list[list[Kernel]]:
        """All but the first, among whose kernels are the step's own, and the last, which the head follows."""
        return layers(self.forward, ANCHOR)[1:]

    @property
    def kernels_a_layer(self) -> int:
        """The most. Where the model is cut, the median: small kernels of the step itself run in some layer beside an
        all-reduce."""
        counts = [len(layer) for layer in self.layers] or [0]
        return max(counts) if self.num_devices == 1 else statistics.median_low(counts)

    @property
    def layer(self) -> list[Kernel]:
        """One from the middle."""
        return self.layers[len(self.layers) // 2] if self.layers else []


def promises(step: Audited) -> dict[str, str]:
    """What is promised of a step, and what is wrong with it: nothing where the promise holds."""
    programs = [step.facts[name] for name in ("forward", "sampler", "truncated")]
    forward = programs[0]
    bucket = step.case.bucket
    most_kernels = _most_kernels(step.spec, bucket, fast_norm=step.fast_norm, num_devices=step.num_devices)
    most_over_floor = MOST_OVER_FLOOR_EXPERTS if step.spec.num_experts else MOST_OVER_FLOOR
    sums = 0 if step.num_devices == 1 else 2 * step.spec.num_layers + 1
    launches = [launch for program in programs for launch in program["launches"]]
    matrices, logits = _matrix_sizes(step.spec), step.case.bucket.num_seqs * step.spec.vocab_size

    def results(wrong: Callable[[Shape], bool]) -> str:
        """Results of kernels that should not be."""
        found = [f"{kernel.name} {shape}" for kernel in step.forward for shape in kernel.outputs if wrong(shape)]
        return ", ".join(found[:4])

    return {
        f"bytes at most {most_over_floor} of the floor": _unless(
            step.over_floor <= most_over_floor, f"{step.over_floor:.3f}"
        ),
        f"at most {most_kernels} kernels a layer": _unless(
            0 < step.kernels_a_layer <= most_kernels, f"{step.kernels_a_layer}"
        ),
        f"{sums} all-reduces, two a layer and the embedding's" if sums else "no all-reduces": _unless(
            step.sums == sums, f"{step.sums}"
        ),
        "the pages are updated in place": _unless(
            forward["alias_bytes"] >= step.facts["pool_bytes"],
            f"{forward['alias_bytes']:,} bytes are aliased, the pages are {step.facts['pool_bytes']:,}",
        ),
        "temporary memory within what is reserved: two layers' activations": _unless(
            forward["temp_bytes"] <= step.facts["most_temp_bytes"],
            f"{forward['temp_bytes']:,} bytes, {step.facts['most_temp_bytes']:,} are reserved",
        ),
        "one CUDA graph a program": _unless(launches == ["kCommandBuffer"] * len(programs), f"launches {launches[:8]}"),
        "no control flow that the host waits for": ", ".join(
            name for program in programs for name in program["control_flow"]
        ),
        "no weight is copied to float32": results(lambda shape: shape.dtype == "f32" and shape.size in matrices),
        "logits of sampled rows alone, in bfloat16": results(
            lambda shape: (
                step.spec.vocab_size in shape.dims
                and (shape.size > logits or (shape.size == logits and shape.dtype != "bf16"))
            )
        ),
    }


def _most_kernels(spec: ModelSpec, bucket: Bucket, *, fast_norm: bool, num_devices: int) -> int:
    """A mixed step has one more, since chunks and decodes attend in kernels of their own; with experts three. With
    fast_norm a single row may have two more: where weights are small XLA writes its products itself, which add nothing
    as they store. (Without fast_norm the norms add it.)"""
    if spec.num_experts:
        return MOST_KERNELS_EXPERTS + 2 * (num_devices > 1) + 3 * (not bucket.decode_only)
    most = (MOST_KERNELS[fast_norm] if num_devices == 1 else MOST_KERNELS_CUT) + (not bucket.decode_only)
    return most + 2 if fast_norm and bucket.num_tokens == 1 else most


def _unless(holds: bool, found: str) -> str:
    return "" if holds else found


def _matrix_sizes(spec: ModelSpec) -> set[int]:
    E, X = spec.hidden_size, max(spec.num_experts, 1)
    return {
        E * (spec.q_size + 2 * spec.kv_size),
        E * spec.q_size,
        X * E * 2 * spec.intermediate_size,
        X * E * spec.intermediate_size,
        E * spec.vocab_size,
    }


def compile_steps(request: Mapping[str, Any], folder: Path, module: str = "bench.audit_compile") -> Iterator[Audited]:
    """Compile what ``request`` (a :class:`bench.audit_compile.Request`) asks for, in a process with the plug-in of
    ``folder`` that runs ``module``.

    Raises:
        BenchError: the process died; the message holds what it said last.
    """
    spec = spec_of(request["model"], request["num_layers"])
    with tempfile.TemporaryDirectory() as dump, open(Path(dump) / "said", "w+", encoding="utf-8") as said:
        command = [sys.executable, "-m", module, json.dumps(request), dump]
        with subprocess.Popen(
            command, env=environment(folder, Path(dump)), stdout=subprocess.PIPE, stderr=said, text=True
        ) as process:
            assert process.stdout is not None, "a pipe was asked for"
            for line in process.stdout:
                if line.startswith("{"):
                    yield audited(json.loads(line), spec, request)
        said.seek(0)
        if process.returncode:
            raise BenchError(f"the compiler's process ended with {process.returncode}: {said.read()[-2000:]}")


def audited(found: Mapping[str, Any], spec: ModelSpec, request: Mapping[str, Any]) -> Audited:
    """A line of :mod:`bench.audit_compile`, read."""
    case = Case(Bucket(**found["bucket"]), request["context"])
    forward, sampler = (_kernels(found[name]["kernels"]) for name in ("forward", "sampler"))
    size, whole = request.get("tensor_parallel_size", 1), request.get("enable_expert_parallel", False)
    part = dataclasses.replace(spec_of_part(spec, size, expert_parallel=whole), vocab_size=-(-spec.vocab_size // size))
    return Audited(part, case, request["target"], request["fast_norm"], forward, sampler, found, size, whole)


def _kernels(rows: Sequence[Any]) -> list[Kernel]:
    return [Kernel(name, tuple(map(_shape, outputs)), read, written) for name, outputs, read, written in rows]


def _shape(text: str) -> Shape:
    dtype, _, dims = text.rstrip("]").partition("[")
    return Shape(dtype, tuple(int(x) for x in dims.split(",") if x))


def report(step: Audited) -> str:
    """A step for people: a layer's kernels, the sums, and the promises."""
    rows = [
        (kernel.name, " ".join(map(str, kernel.outputs[:2])), f"{kernel.read / 1e6:.2f}", f"{kernel.written / 1e6:.2f}")
        for kernel in step.layer
    ]
    floor, forward = step.floor, step.facts["forward"]
    parts = ", ".join(f"{name.replace('_', ' ')} {value / 1e9:.3f}" for name, value in floor._asdict().items())
    lines = [
        f"\n{step.case.bucket}, context {step.case.context}",
        markdown_table(("kernel of a layer", "results", "read MB", "written MB"), rows),
        f"{len(step.forward)} kernels of the forward, {len(step.sampler)} of the sampler",
        f"read {step.read / 1e9:.3f} GB, written {step.written / 1e9:.3f} GB",
        f"together {step.over_floor:.4f} of the floor, {floor.total / 1e9:.3f} GB ({parts})",
        f"temporary {forward['temp_bytes'] / 1e6:.1f} MB, aliased {forward['alias_bytes'] / 1e9:.3f} GB of pages and "
        f"state; compiled in {step.facts['seconds']} s",
    ]
    for what, wrong in promises(step).items():
        lines.append(f"BROKEN {what}: {wrong}" if wrong else f"ok     {what}")
    return "\n".join(lines)


def summary(step: Audited) -> dict[str, Any]:
    """A step for a file."""
    kept = {"forward": ("alias_bytes", "temp_bytes", "output_bytes"), "sampler": ("temp_bytes",)}
    return {
        "bucket": str(step.case.bucket),
        "kernels_a_layer": step.kernels_a_layer,
        "kernels": {"forward": len(step.forward), "sampler": len(step.sampler)},
        "read_bytes": round(step.read),
        "written_bytes": round(step.written),
        "floor_bytes": {name: round(value) for name, value in step.floor._asdict().items()},
        "over_floor": round(step.over_floor, 4),
        "pool_bytes": step.facts["pool_bytes"],
        "programs": {name: {key: step.facts[name][key] for key in keys} for name, keys in kept.items()},
        "layer": [
            {"kernel": kernel.name, "read_bytes": round(kernel.read), "written_bytes": round(kernel.written)}
            for kernel in step.layer
        ],
        "broken": {what: wrong for what, wrong in promises(step).items() if wrong},
    }


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("audit", __doc__, seed=0, seed_help="nothing is drawn; taken as every bench takes it")
    parser.add_argument("--target", choices=sorted(TARGETS), default="h200")
    parser.add_argument("--model", choices=sorted(MODELS), default="llama-3.1-8b")
    parser.add_argument("--layers", type=_layers, metavar="N", help="cut the model after so many, 3 or more")
    parser.add_argument(
        "--rows", type=_rows, default=(1, 32, 256), metavar="N,N", help="decode steps; default 1,32,256"
    )
    parser.add_argument("--tokens", type=positive, default=2048, metavar="N", help="of the mixed step; default 2048")
    parser.add_argument("--context", type=positive, default=1024, metavar="N", help="of a decode; default 1024")
    parser.add_argument("--fast-norm", action="store_true", help="the engine's setting of that name")
    parser.add_argument(
        "--tensor-parallel-size", type=positive, default=1, metavar="N", help="GPUs that the model is cut over"
    )
    parser.add_argument("--enable-expert-parallel", action="store_true", help="whole experts on each of these GPUs")
    parser.add_argument(
        "--plugin", type=Path, metavar="DIR", help="folder of the CUDA plug-in; default: the user's cache"
    )
    return parser


def _layers(text: str) -> int:
    number = positive(text)
    if number < 3:
        raise argparse.ArgumentTypeError("must be at least 3: the first and the last are not like the others")
    return number


def _rows(text: str) -> tuple[int, ...]:
    return tuple(sorted({positive(part) for part in text.split(",")}))


def measure(options: argparse.Namespace) -> Result:
    """
    Raises:
        BenchError: the plug-in can't be had, the compiler died, or a promise is broken.
    """
    try:
        folder = install_plugin(options.plugin)
    except NoPluginError as error:
        raise BenchError(str(error)) from error
    request = {
        "target": options.target,
        "model": options.model,
        "num_layers": options.layers,
        "rows": options.rows,
        "tokens": options.tokens,
        "context": options.context,
        "fast_norm": options.fast_norm,
        "tensor_parallel_size": options.tensor_parallel_size,
        "enable_expert_parallel": options.enable_expert_parallel,
    }
    print(f"{options.model} on {options.target}, jax {importlib.metadata.version('jax')}, nothing runs: compiled only")
    steps = []
    for step in compile_steps(request, folder):
        print(report(step), flush=True)
        steps.append(summary(step))
    return {"jax": importlib.metadata.version("jax")} | request | {"steps": steps}


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    result = measure(options)
    save(options.json, result)
    broken = sum(len(step["broken"]) for step in result["steps"])
    if broken:
        raise BenchError(f"{broken} promises are broken")


if __name__ == "__main__":
    sys.exit(run(main))
