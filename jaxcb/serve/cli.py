"""The command line: flags named as vLLM names them, turned into an EngineConfig and the server's own options."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from jaxcb.config import Backend, EngineConfig, Quantization
from jaxcb.errors import ConfigError
from jaxcb.presets import engine_settings
from jaxcb.scheduler.knobs import Batching, Preemption, Reservation, Victim
from jaxcb.scheduler.policy import POLICIES

_SIZE = re.compile(r"(\d+)(?:([KMGT])(i?)B?|B)?", re.IGNORECASE)
_LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Settings of the server around the engine.

    Arguments:
        chat_template: Jinja source that replaces the model's own.
        drain_timeout_s: how long running requests may go on after the first SIGTERM or SIGINT.
        profile: a directory for what jax's profiler sees while the server runs.
    """

    host: str
    port: int
    api_key: str | None
    served_model_names: tuple[str, ...]
    chat_template: str | None
    drain_timeout_s: float
    log_level: str
    profile: str | None


def parse(argv: Sequence[str] | None = None) -> tuple[EngineConfig, ServeOptions]:
    """Read the command line; argparse ends the process (status 2) on flags it can't read.

    Raises:
        ConfigError: a value can't work.
    """
    preset, _ = _preset_parser().parse_known_args(argv)
    parser = _parser()
    if preset.preset is not None:
        parser.set_defaults(**engine_settings(preset.preset))  # so that the other flags stand over it
    args = parser.parse_args(argv)
    config = EngineConfig(**{field.name: getattr(args, field.name) for field in dataclasses.fields(EngineConfig)})
    if not math.isfinite(args.drain_timeout) or args.drain_timeout < 0:
        raise ConfigError(f"--drain-timeout must be 0 or more seconds, got {args.drain_timeout}", param="drain_timeout")
    if not 0 <= args.port < 65536:
        raise ConfigError(f"--port must be in [0, 65535], got {args.port}", param="port")
    if args.api_key is not None and not (args.api_key.isascii() and args.api_key.isprintable() and args.api_key):
        raise ConfigError("--api-key must be a non-empty string of printable ASCII characters", param="api_key")
    options = ServeOptions(
        host=args.host,
        port=args.port,
        api_key=args.api_key,
        served_model_names=tuple(args.served_model_name),
        chat_template=None if args.chat_template is None else _read_template(args.chat_template),
        drain_timeout_s=args.drain_timeout,
        log_level=args.log_level,
        profile=args.profile,
    )
    return config, options


def _preset_parser() -> argparse.ArgumentParser:
    """Reads ``--preset`` and nothing else."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preset")
    return parser


def _parser() -> argparse.ArgumentParser:
    """Every field of EngineConfig is a destination; flags that say nothing leave the field's own default."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxcb.serve",
        usage="python -m jaxcb.serve [options]",
        description="Serve a language model over an OpenAI-compatible HTTP API.",
        allow_abbrev=False,
        formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=48, width=100),
    )
    parser.set_defaults(**{field.name: field.default for field in dataclasses.fields(EngineConfig)})

    model = parser.add_argument_group("model")
    model.add_argument("--model", metavar="DIR|ID|FILE.gguf", help="default: the built-in SmolLM2-135M-Instruct")
    model.add_argument("--revision", metavar="REV", help="branch, tag or commit of a hub id")
    model.add_argument("--dtype", choices=("auto", "float32", "bfloat16"))
    model.add_argument("--quantization", choices=get_args(Quantization), help="of the weights, when they are loaded")
    model.add_argument(
        "--generation-config",
        type=lambda text: "none" if text == "vllm" else text,
        metavar="auto|none|DIR",
        help="the model's own sampling defaults; default auto",
    )
    model.add_argument("--chat-template", metavar="FILE", help="Jinja file instead of the model's own template")

    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="default 127.0.0.1: this machine only")
    server.add_argument("--port", type=int, default=8000, help="default 8000; 0 takes a free one")
    server.add_argument("--api-key", metavar="KEY", help="every /v1 path asks for it")
    server.add_argument("--served-model-name", nargs="+", default=(), metavar="NAME", help="default: the model's name")
    server.add_argument("--drain-timeout", type=float, default=30.0, metavar="S", help="default 30 seconds")
    server.add_argument("--log-level", choices=_LOG_LEVELS, default="info")

    limits = parser.add_argument_group("limits")
    limits.add_argument("--max-model-len", type=int, metavar="N", help="most tokens of a prompt and its answer")
    limits.add_argument("--max-num-seqs", type=int, metavar="N", help="most sequences in a step")
    limits.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="most tokens in a step")
    limits.add_argument("--max-waiting", type=int, metavar="N", help="queue length; one more gets 429 (default: none)")

    memory = parser.add_argument_group("KV cache")
    memory.add_argument("--block-size", "--page-size", type=int, dest="page_size", metavar="N", help="tokens in a page")
    memory.add_argument("--num-kv-pages", "--num-gpu-blocks-override", type=int, metavar="N", help="pages in the pool")
    memory.add_argument("--kv-cache-memory-bytes", type=_num_bytes, metavar="N", help="or sized so: 512M, 2GiB")
    memory.add_argument("--gpu-memory-utilization", type=float, metavar="F", help="part of a GPU's memory to take")
    memory.add_argument("--no-enable-prefix-caching", action="store_false", dest="enable_prefix_caching")
    memory.add_argument(
        "--host-kv-gib", "--swap-space", type=float, metavar="GIB", help="host memory for KV; default 0"
    )

    _add_scheduling(parser)

    engine = parser.add_argument_group("engine")
    engine.add_argument("--preset", metavar="NAME", help="schedule as another system does: vllm-v1, sarathi, tgi, ...")
    engine.add_argument("--backend", choices=get_args(Backend), help="kernels; default: by platform")
    engine.add_argument("--no-run-ahead", "--no-async-scheduling", action="store_false", dest="run_ahead")
    engine.add_argument(
        "--deterministic", action="store_true", help="the same bits in any company; costs speed (README)"
    )
    engine.add_argument("--step-log", metavar="FILE", help="a line of JSON a step, to calibrate the simulator")
    engine.add_argument("--trace", metavar="FILE", help="of what the engine did when, for Perfetto")
    engine.add_argument("--profile", metavar="DIR", help="of jax's profiler, for TensorBoard")
    engine.add_argument("--seed", type=int, metavar="N", help="for requests that bring none")
    engine.add_argument("--event-log", metavar="FILE", help="what the scheduler did (holds the prompts)")
    return parser


def _add_scheduling(parser: argparse.ArgumentParser) -> None:
    """A flag for each of the scheduler's knobs; --help shows those that a server is most often tuned by."""
    group = parser.add_argument_group("scheduling (the README lists every knob; each has a flag)")
    group.add_argument(
        "--policy",
        "--scheduling-policy",
        choices=tuple(POLICIES),
        metavar="NAME",
        help=f"who is next: {', '.join(POLICIES)}",
    )
    group.add_argument("--long-prefill-token-threshold", type=int, metavar="N", help="default: half the budget; 0: off")
    group.add_argument("--itl-target-ms", type=float, metavar="MS", help="time between tokens to hold")
    group.add_argument("--reservation", choices=get_args(Reservation), help="of pages; default optimistic")
    group.add_argument("--admission-watermark", type=float, metavar="F", help="part of the pages to leave free")
    group.add_argument("--preemption", choices=get_args(Preemption), help="default auto")
    rare = functools.partial(group.add_argument, help=argparse.SUPPRESS)
    rare("--length-predictor", choices=("max_tokens", "observed"))
    rare("--priority-ageing-s", "--priority-ageing", type=float)
    rare("--batching", choices=get_args(Batching))
    rare("--victim", choices=get_args(Victim))
    rare("--waiting-served-ratio", type=float)
    for name in ("overtakes", "passes", "chunk-tokens", "num-partial-prefills", "waiting-steps"):
        rare(f"--max-{name}", type=int)
    rare("--prefill-first", action="store_true")
    rare("--exact-fill", action=argparse.BooleanOptionalAction)
    rare("--enable-chunked-prefill", action=argparse.BooleanOptionalAction)


def _num_bytes(text: str) -> int:
    """Bytes in "1000", "512M" (10^6) or "2GiB" (2^30)."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"must be bytes, such as 1073741824, 512M or 2GiB; got {text!r}")
    number, letter, binary = match.groups()
    base = 1024 if binary else 1000
    return int(number) * (base ** ("KMGT".index(letter.upper()) + 1) if letter else 1)


def _read_template(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template: can't read {file}: {error}", param="chat_template") from error
