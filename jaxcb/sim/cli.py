"""The command line of the simulator; flags that the server has too are named as there."""

from __future__ import annotations

import argparse
import functools

from jaxcb.config import EngineConfig
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
    "admission_watermark",
)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; argparse ends the process (status 2) on flags it can't read."""
    return _parser().parse_args(arguments)


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """The engine's side of the options of ``run``.

    Raises:
        ConfigError: a value can't work.
    """
    return EngineConfig(
        **{name: getattr(options, name) for name in _ENGINE_FLAGS if getattr(options, name) is not None}
    )


def _parser() -> argparse.ArgumentParser:
    wide = functools.partial(argparse.HelpFormatter, max_help_position=36, width=100)
    parser = argparse.ArgumentParser(
        prog="python -m jaxcb.sim",
        description="Runs the engine's own scheduler under a virtual clock: hours of traffic in minutes, no GPU.",
        formatter_class=wide,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, dest="command", metavar="reference|run")
    reference = commands.add_parser(
        "reference",
        help="static batching, textbook continuous batching and this scheduler on the same 2,000 requests",
        description="Static batching, textbook continuous batching and this scheduler on the same 2,000 requests.",
        formatter_class=wide,
        allow_abbrev=False,
    )
    reference.add_argument("--no-progress", action="store_false", dest="progress", help="no progress bar")
    _add_run(
        commands.add_parser(
            "run",
            help="one trace on one GPU: throughput, latencies, use of the KV cache",
            description="Simulate one trace on one GPU. Ctrl-C prints what was done so far.",
            formatter_class=wide,
            allow_abbrev=False,
        )
    )
    return parser


def _add_run(run: argparse.ArgumentParser) -> None:
    traffic = run.add_argument_group("traffic")
    traffic.add_argument("--trace", choices=TRACES, default="sharegpt", help="lengths and burstiness; default sharegpt")
    traffic.add_argument(
        "--rate", type=float, default=float("inf"), metavar="R", help="requests/s; default inf: all at 0"
    )
    traffic.add_argument("--num-requests", type=int, default=1000, metavar="N", help="default 1000")
    traffic.add_argument("--seed", type=int, default=42, metavar="N", help="of lengths and arrivals; default 42")

    machine = run.add_argument_group("machine")
    machine.add_argument("--gpu", choices=GPUS, default="h200", help="default h200")
    models = ", ".join(f"{key} {model.name}" for key, model in MODELS.items())
    machine.add_argument("--model", choices=MODELS, default="8b", help=f"in bfloat16; default 8b. {models}")

    engine = run.add_argument_group("engine", "defaults: what the engine chooses on that GPU")
    engine.add_argument("--max-model-len", type=int, metavar="N", help="most tokens of a prompt and its answer")
    engine.add_argument("--max-num-seqs", type=int, metavar="N", help="most sequences in a step")
    engine.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="most tokens in a step")
    engine.add_argument("--block-size", "--page-size", type=int, dest="page_size", metavar="N", help="tokens in a page")
    engine.add_argument("--num-kv-pages", "--num-gpu-blocks-override", type=int, metavar="N", help="pages in the pool")
    engine.add_argument("--gpu-memory-utilization", type=float, metavar="F", help="part of the GPU's memory to take")
    engine.add_argument("--admission-watermark", type=float, metavar="F", help="part of the pages kept from admissions")
    engine.add_argument("--no-enable-prefix-caching", action="store_false", dest="enable_prefix_caching")
    engine.add_argument("--no-run-ahead", "--no-async-scheduling", action="store_false", dest="run_ahead")

    output = run.add_argument_group("output")
    form = output.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    form.add_argument(
        "--timeline", action="store_true", help="also draw the first steps: a row a request, a column each"
    )
    output.add_argument("--no-progress", action="store_false", dest="progress", help="no progress bar")
