"""Everything that is to be known of a GPU, in one command of at most 8 minutes: `bench/gpu.sh`.

Kernels against their reference, and timed; every compiled shape of two models against the device's ceilings; chats
through the engine and through transformers, on the same random weights and requests; the device's idle time.

Each part is a process of its own with a time budget: one that is slow, or that crashes, takes nothing from the others,
and what it has measured by then is kept. What a part leaves over, later ones may use. The result is written after every
part. Without a GPU, or with --dry, all of it runs on the CPU with tiny shapes.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.common import Result, machine, make_parser, run, save
from bench.gpu_report import report

MODELS = ("llama-3.1-8b", "qwen3-0.6b")
ROOT = Path(__file__).parents[1]
BUDGET_S = 450.0
TAIL = 600
"""Characters of a failed part's output that are kept."""
KILL_AFTER_S = 5.0
FOR_WORK = 0.8
"""Of a part's time; the rest is for starting, and for finishing what was begun."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A command. ``{out}`` in it is a file that it writes its JSON to, ``{seconds}`` how long it may take."""

    name: str
    seconds: float
    command: Sequence[str]
    why_not: str = ""
    """A reason to leave it out."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Variables of its own."""
    read: Callable[[Path, str], Result] = lambda out, printed: json.loads(out.read_text(encoding="utf-8"))
    """(the file, what it printed) -> its result; of a part that was stopped, too."""


def parts_of(*, dry: bool, seed: int, folder: Path, torch_python: str) -> list[Part]:
    """In the order of running. ``seconds`` add up to ``BUDGET_S``."""
    flags = ("--dry",) if dry else ()
    python = (sys.executable, "-m")
    workers = "0" if dry else "4"  # they compile at the same time
    tests = (*python, "pytest", "tests/gpu", "-n", workers, "-v", "--no-header", "-p", "no:cacheprovider")
    files = ("--json", "{out}", "--markdown", "{out}.md")
    out = [
        Part(
            name="kernel tests",
            seconds=60,
            command=tests,
            why_not=_missing("pytest", "xdist", "pytest_timeout") or ("" if (ROOT / "tests").is_dir() else "no tests/"),
            environment={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
            read=lambda out, printed: count_tests(printed),
        ),
        Part(
            name="kernels",
            seconds=60,
            command=(*python, "bench.kernels", *flags, "--budget-s", "{seconds}", *files),
            read=_kernels,
        ),
    ]
    for model, seconds, peer_seconds in zip(MODELS, (150, 70), (70, 40), strict=True):
        weights = folder / model
        mine = ("bench.gpu_model", "--model", model, "--seed", f"{seed}", "--seconds", "{seconds}", "--json", "{out}")
        out.append(
            Part(name=model, seconds=seconds, command=(*python, *mine, "--hand-over", str(weights), *flags)),
        )
        out.append(
            Part(
                name=f"transformers {model}",
                seconds=peer_seconds,
                command=(
                    torch_python,
                    str(ROOT / "bench/torch_side/peer.py"),
                    str(weights),
                    "--json",
                    "{out}",
                    "--seconds",
                    "{seconds}",
                ),
                why_not=_no_torch(torch_python),
            )
        )
    return out


def run_part(part: Part, limit_s: float, folder: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Its outcome ("done", "stopped" by the limit, "failed", "left out"), its result, and a note that says why."""
    row: dict[str, Any] = {"outcome": "left out", "took_s": 0.0, "limit_s": limit_s, "result": {}}
    if part.why_not:
        return row | {"note": part.why_not}
    out = folder / f"{part.name.replace(' ', '-')}.json"
    for_work_s = max(FOR_WORK * limit_s, 1.0)
    command = [word.replace("{out}", str(out)).replace("{seconds}", f"{for_work_s:.0f}") for word in part.command]
    begun_s = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as printed:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment, **part.environment},
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(limit_s)
            row["outcome"] = "failed" if status else "done"
        except subprocess.TimeoutExpired:
            row["outcome"] = "stopped"
            _stop(process)
        except BaseException:
            _stop(process)
            raise
        printed.seek(0)
        text = printed.read()
    row["took_s"] = time.monotonic() - begun_s
    try:
        row["result"] = part.read(out, text)
    except (OSError, ValueError) as error:
        row["note"] = f"no result: {type(error).__name__}"
    if row["outcome"] != "done":
        row["note"] = f"{row['outcome']}: {text.strip()[-TAIL:]}"
    return row


def _stop(process: subprocess.Popen[bytes]) -> None:
    """The part and what it started. An interrupt, so that it may say what it has; what a shell runs in the background
    ignores those, and so do its children."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    for number in (signal.SIGTERM if ignored else signal.SIGINT, signal.SIGKILL):
        os.killpg(process.pid, number)
        try:
            process.wait(KILL_AFTER_S)
            return
        except subprocess.TimeoutExpired:
            continue


def count_tests(printed: str) -> Result:
    """Outcomes of ``pytest -v``, and the names of those that failed; of a run that was stopped, too."""
    alone = re.findall(r"^(tests/\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)", printed, re.MULTILINE)
    of_workers = re.findall(r"^\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|ERROR|SKIPPED) (.*?) *$", printed, re.MULTILINE)
    lines = alone + [(name, outcome) for outcome, name in of_workers]
    counts = Counter(outcome.lower() for _, outcome in lines)
    return dict(counts) | {"failures": [name for name, outcome in lines if outcome in ("FAILED", "ERROR")]}


def _kernels(out: Path, printed: str) -> Result:
    markdown = out.with_name(out.name + ".md").read_text(encoding="utf-8")
    return json.loads(out.read_text(encoding="utf-8")) | {"markdown": markdown}


def _missing(*modules: str) -> str:
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


def _no_torch(python: str) -> str:
    """Why that Python can't run transformers."""
    found = subprocess.run([python, "-c", "import torch, transformers"], capture_output=True, text=True)
    return "" if found.returncode == 0 else f"{python}: {(found.stderr.strip().splitlines() or ['it fails'])[-1]}"


def find_device() -> dict[str, Any] | None:
    """What jax finds; None without a GPU, or a plug-in for it. Asked for in another process: this one takes no memory
    of a GPU, which the parts need."""
    code = "import json; from bench.kernels import device_facts; print(json.dumps(device_facts()))"
    environment = os.environ | {"JAX_PLATFORMS": "cuda"}
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    return json.loads(found.stdout.splitlines()[-1]) if found.returncode == 0 else None


def room_for_weights() -> Path:
    """Memory before disk: 16 GB of weights are written and read at once."""
    shared = Path("/dev/shm")
    roomy = shared.is_dir() and os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > 24e9
    return Path(tempfile.mkdtemp(prefix="jaxcb-gpu-", dir=shared if roomy else None))


def measure(
    parts: Sequence[Part],
    result: Result,
    *,
    budget_s: float,
    folder: Path,
    environment: Mapping[str, str],
    write: Callable[[Result], None],
) -> None:
    """Run the parts one after the other, and write what there is after each."""
    until_s = time.monotonic() + budget_s
    scale = budget_s / sum(part.seconds for part in parts)
    for number, part in enumerate(parts):
        reserved_s = sum(later.seconds for later in parts[number + 1 :]) * scale
        limit_s = max(until_s - time.monotonic() - reserved_s, 1.0)
        print(f"{part.name}: at most {limit_s:.0f} s", file=sys.stderr, flush=True)
        result["parts"][part.name] = row = run_part(part, limit_s, folder, environment)
        print(f"{part.name}: {row['outcome']} after {row['took_s']:.0f} s", file=sys.stderr, flush=True)
        write(result)


def main(argv: Sequence[str] | None = None) -> Result:
    """The command line."""
    parser = make_parser("gpu", __doc__, seed=0, seed_help="of weights and requests")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help=f"for all parts; default {BUDGET_S:g}")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), metavar="DIR", help="default gpu-results/")
    parser.add_argument(
        "--parts", metavar="NAME,NAME", help="only those that begin so (kernels,llama,transformers ...)"
    )
    parser.add_argument("--torch-python", default=sys.executable, metavar="FILE", help="a Python with torch")
    args = parser.parse_args(argv)
    facts = machine()
    device = None if args.dry else find_device()
    dry = device is None
    if dry and not args.dry:
        print("jax finds no NVIDIA GPU: this is a dry run on the CPU", file=sys.stderr)
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    if dry:
        environment["JAX_PLATFORMS"] = "cpu"
    result: Result = {
        "bench": "gpu",
        "dry": dry,
        "machine": facts,
        "device": device or {"device": "cpu", "driver": "none", "jax": facts["jax"], "date": time.strftime("%Y-%m-%d")},
        "models": MODELS,
        "parts": {},
    }
    args.out.mkdir(parents=True, exist_ok=True)

    def write(result: Result) -> None:
        save(args.out / "gpu.json", result)
        (args.out / "gpu.md").write_text(report(result), encoding="utf-8")

    folder = room_for_weights()
    try:
        parts = parts_of(dry=dry, seed=args.seed, folder=folder, torch_python=args.torch_python)
        if args.parts is not None:
            parts = [part for part in parts if part.name.startswith(tuple(args.parts.split(",")))]
        measure(parts, result, budget_s=args.budget_s, folder=folder, environment=environment, write=write)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    save(args.json, result)
    print(report(result))
    print(f"written: {args.out / 'gpu.json'}, {args.out / 'gpu.md'}", file=sys.stderr)
    return result


if __name__ == "__main__":
    raise SystemExit(run(main))
