"""The command line of the planner."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence

from jaxcb.sim.gpus import GPUS
from jaxcb.sim.models import MODELS
from jaxcb.sim.trace import WORKLOADS

COMMANDS = ("capacity", "shapes", "static", "requests", "chunk", "swap", "prefix")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; without a command it is that of ``capacity``. argparse ends the process (status 2) on
    flags that it can't read."""
    asked_for = arguments and (arguments[0] in COMMANDS or arguments[0] in ("-h", "--help"))
    return _parser().parse_args(list(arguments) if asked_for else ["capacity", *arguments])


def _parser() -> argparse.ArgumentParser:
    wide = functools.partial(argparse.HelpFormatter, max_help_position=36, width=100)
    parser = argparse.ArgumentParser(
        prog="python -m jaxcb.plan",
        description="What a model on a card can serve. Without a command: capacity.",
        formatter_class=wide,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, dest="command", metavar="COMMAND")
    add = functools.partial(commands.add_parser, formatter_class=wide, allow_abbrev=False)
    _add_capacity(add("capacity", help="memory, throughput, latency and budgets of a model on a GPU"))
    _add_shapes(add("shapes", help="ways to put a model on several GPUs, side by side"))

    static = add("static", help="utilization of a static batch of such lengths, against continuous batching")
    static.add_argument("lengths", type=_lengths, metavar="N,N,...", help="tokens of each answer")

    requests = add("requests", help="requests whose KV fits beside the weights")
    requests.add_argument("--memory-gb", type=_positive, default=80.0, metavar="GB", help="default 80")
    requests.add_argument("--weights-gb", type=_positive, required=True, metavar="GB")
    requests.add_argument("--kv-kb", type=_positive, required=True, metavar="KB", help="of KV a token, in 1,000 bytes")
    requests.add_argument("--context", type=_count, required=True, metavar="N", help="tokens of a request")

    chunk = add("chunk", help="chunk and longest prompt under limits of TTFT and ITL")
    chunk.add_argument("--ttft-ms", type=_positive, required=True, metavar="MS")
    chunk.add_argument("--itl-ms", type=_positive, required=True, metavar="MS")
    chunk.add_argument("--prefill", type=_positive, required=True, metavar="TOK/S", help="speed of prefill")
    chunk.add_argument("--decode", type=_positive, required=True, metavar="TOK/S", help="of one sequence, undisturbed")

    swap = add("swap", help="time to move a sequence's KV to the host")
    swap.add_argument("--tokens", type=_count, required=True, metavar="N")
    swap.add_argument("--kv-kb", type=_positive, required=True, metavar="KB", help="of KV a token, in 1,000 bytes")
    swap.add_argument("--link-gbs", type=_positive, default=32.0, metavar="GB/S", help="default 32: PCIe Gen4 x16")

    prefix = add("prefix", help="gain of a shared prefix: formula and simulated curve")
    _add_machine(prefix)
    prefix.add_argument("--prefix", type=_count, default=4000, metavar="N", help="shared tokens; default 4000")
    prefix.add_argument("--suffix", type=_count, default=100, metavar="N", help="tokens of one's own; default 100")
    prefix.add_argument("--output", type=_count, default=50, metavar="N", help="tokens of an answer; default 50")
    prefix.add_argument(
        "--users", type=_lengths, default=[1, 2, 4, 8, 16, 32, 64], metavar="N,N,...", help="default 1,2,4,...,64"
    )
    return parser


def _add_machine(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--model",
        default="8b",
        metavar="NAME|DIR|ID",
        help=f"one of {', '.join(MODELS)} (default 8b), a directory with config.json, or a hub id",
    )
    machine.add_argument("--gpu", choices=GPUS, default="h100", help="default h100")
    return machine


def _add_workload(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    workload = parser.add_argument_group("workload")
    workload.add_argument("--workload", choices=WORKLOADS, default="sharegpt", help="mean lengths of; default sharegpt")
    workload.add_argument("--prompt", type=_count, metavar="N", help="tokens of a prompt instead")
    workload.add_argument("--output", type=_count, metavar="N", help="tokens of an answer instead")
    workload.add_argument("--rate", type=_positive, metavar="R", help="requests/s: prints TTFT and ITL at that rate")
    return workload


def _add_limits(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    limits = parser.add_argument_group("limits")
    limits.add_argument("--max-num-seqs", type=_count, metavar="N", help="most sequences in a step; default 256")
    limits.add_argument("--max-num-batched-tokens", type=_count, metavar="N", help="most tokens in a step")
    limits.add_argument("--max-model-len", type=_count, metavar="N", help="most tokens of a prompt and its answer")
    limits.add_argument("--gpu-memory-utilization", type=_positive, metavar="F", help="default 0.92")
    return limits


def _add_shapes(parser: argparse.ArgumentParser) -> None:
    machine = _add_machine(parser)
    machine.add_argument("--num-gpus", type=_count, default=2, metavar="N", help="of one machine; default 2")
    _add_workload(parser)
    _add_limits(parser)


def _add_capacity(parser: argparse.ArgumentParser) -> None:
    machine = _add_machine(parser)
    machine.add_argument(
        "--tensor-parallel-size", "-tp", type=_count, metavar="N", help="GPUs that the model is cut over; default 1"
    )
    workload = _add_workload(parser)
    workload.add_argument("--lengths", type=_lengths, metavar="N,N,...", help="of answers: prints static utilization")
    limits = _add_limits(parser)
    limits.add_argument("--itl-ms", type=_positive, metavar="MS", help="prints the largest token budget that holds it")


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def _lengths(text: str) -> list[int]:
    return [_count(part.strip()) for part in text.split(",")]
