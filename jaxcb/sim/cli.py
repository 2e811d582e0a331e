"""The command line of the simulator; flags that the server has too are named as there."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

from jaxcb.presets import PRESETS
from jaxcb.sim.gpus import GPUS
from jaxcb.sim.models import MODELS
from jaxcb.sim.traces import TRACES

_ENGINE_FLAGS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "page_size",
    "num_kv_pages",
    "gpu_memory_utilization",
    "enable_prefix_caching",
    "run_ahead",
    "policy",
    "admission_watermark",
    "reservation",
    "preemption",
    "host_kv_gib",
    "itl_target_ms",
)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; argparse ends the process (status 2) on flags it can't read."""
    return _parser().parse_args(arguments)


def engine_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Fields of EngineConfig that were given."""
    return {name: getattr(options, name) for name in _ENGINE_FLAGS if getattr(options, name, None) is not None}


def _parser() -> argparse.ArgumentParser:
    wide = functools.partial(argparse.HelpFormatter, max_help_position=36, width=100)
    parser = argparse.ArgumentParser(
        prog="python -m jaxcb.sim",
        description="Runs the engine's own scheduler under a virtual clock: hours of traffic in minutes, no GPU. "
        "Ctrl-C prints what was done so far.",
        formatter_class=wide,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, dest="command", metavar="COMMAND")

    def add(name: str, text: str, *groups: Callable[[argparse.ArgumentParser], None]) -> None:
        command = commands.add_parser(
            name, help=text, description=text[0].upper() + text[1:] + ".", formatter_class=wide, allow_abbrev=False
        )
        for group in groups:
            group(command)

    one = (_traffic, _machine, _preset)
    add("run", "one trace: throughput, latencies, use of the KV cache", *one, _engine, _run_output)
    add("compare", "many published systems on one trace", _traffic, _machine, _limits, _presets, _engine, _table_output)
    grid = (*one, _grid, _limits, _engine, _table_output)
    add("sweep", "throughput against latency over budgets and batch sizes", *grid)
    add("mechanisms", "what each idea of continuous batching brings, one switch at a time")
    add("presets", "the systems that there are, with their sources", _json_output)
    add("reference", "the textbook's experiment, and this scheduler on the same 2,000 requests", _no_progress)
    return parser


def _traffic(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("traffic")
    group.add_argument(
        "--workload",
        default="sharegpt",
        metavar="NAME|FILE",
        help=f"{', '.join(TRACES)}, or a .csv or .jsonl file; default sharegpt",
    )
    group.add_argument("--rate", type=float, metavar="R", help="requests/s; default: all at 0, or the file's own times")
    group.add_argument("--cv", type=float, dest="gap_cv", metavar="F", help="burstiness of arrivals; 1 is Poisson")
    group.add_argument("--users", type=int, dest="num_users", metavar="N", help="a closed loop of N users instead")
    group.add_argument("--num-requests", type=int, metavar="N", help="default 1000, or all of the file")
    group.add_argument("--seed", type=int, default=42, metavar="N", help="of lengths and arrivals; default 42")


def _machine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("machine")
    group.add_argument("--gpu", choices=GPUS, default="h100", help="default h100")
    group.add_argument("--num-gpus", type=int, metavar="N", help="each holds the model; default 1, of compare 2")
    models = ", ".join(f"{key} {model.name}" for key, model in MODELS.items())
    group.add_argument("--model", choices=MODELS, default="8b", help=f"in bfloat16; default 8b. {models}")


def _preset(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("system")
    group.add_argument("--preset", metavar="NAME", help="schedule as another system does; see `presets`")


def _presets(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("systems")
    group.add_argument(
        "--presets", type=_names, metavar="NAME,NAME,...", help=f"default: all {len(PRESETS)} that the GPUs can run"
    )


def _engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine", "stands over a preset; default: what the engine chooses on that GPU")
    group.add_argument("--max-model-len", type=int, metavar="N", help="most tokens of a prompt and its answer")
    group.add_argument("--max-num-seqs", type=int, metavar="N", help="most sequences in a step")
    group.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="most tokens in a step")
    group.add_argument("--block-size", "--page-size", type=int, dest="page_size", metavar="N", help="tokens in a page")
    group.add_argument("--num-kv-pages", "--num-gpu-blocks-override", type=int, metavar="N", help="pages in the pool")
    group.add_argument("--gpu-memory-utilization", type=float, metavar="F", help="part of the GPU's memory to take")
    group.add_argument("--policy", metavar="NAME", help="fcfs, sjf, prefix, ...: who is next")
    group.add_argument("--reservation", metavar="NAME", help="optimistic, guaranteed or full")
    group.add_argument("--admission-watermark", type=float, metavar="F", help="part of the pages kept from admissions")
    group.add_argument("--preemption", metavar="NAME", help="recompute, swap or auto")
    group.add_argument("--host-kv-gib", type=float, metavar="F", help="host memory for swapped and evicted pages")
    group.add_argument("--itl-target-ms", type=float, metavar="F", help="time between tokens to hold")
    group.add_argument("--no-enable-prefix-caching", action="store_false", dest="enable_prefix_caching", default=None)
    group.add_argument("--no-run-ahead", action="store_false", dest="run_ahead", default=None)


def _limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits that goodput counts")
    group.add_argument("--ttft-ms", type=float, default=1000.0, metavar="MS", help="default 1000")
    group.add_argument("--tpot-ms", type=float, default=50.0, metavar="MS", help="default 50")


def _grid(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("grid")
    group.add_argument("--budgets", type=_counts, metavar="N,N,...", help="token budgets; default 64,128,...,8192")
    group.add_argument("--seqs", type=_counts, metavar="N,N,...", help="sequences a step; default 16,64,256")


def _run_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    form = group.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    form.add_argument("--timeline", action="store_true", help="draw the first steps as text: a row a request")
    group.add_argument("--plot", metavar="FILE.png", help="draw them as a picture")
    group.add_argument("--trace", metavar="FILE.json", help="write every step for ui.perfetto.dev")
    group.add_argument("--step-log", metavar="FILE", help="step times fitted to a real run (serve --step-log)")
    _progress(group)


def _table_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    group.add_argument("--plot", metavar="FILE.png", help="draw it, with matplotlib")
    _progress(group)


def _json_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="with their settings, as one JSON object")


def _no_progress(parser: argparse.ArgumentParser) -> None:
    _progress(parser.add_argument_group("output"))


def _progress(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--no-progress", action="store_false", dest="progress", help="no progress bar")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _counts(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"must be positive integers, such as 256,512; got {text!r}")
    return [int(part) for part in parts]
