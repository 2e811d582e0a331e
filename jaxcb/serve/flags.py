"""The flags of ``python -m jaxcb.serve``, named as vLLM names them where the meaning is the same."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
from typing import get_args

from jaxcb.config import Backend, EngineConfig, KVCacheDType, Quantization
from jaxcb.parsing import REASONING_PARSERS
from jaxcb.scheduler.knobs import Batching, Preemption, Reservation, Victim
from jaxcb.scheduler.policy import POLICIES

_SIZE = re.compile(r"(\d+)(?:([KMGT])(i?)B?|B)?", re.IGNORECASE)
_LOG_LEVELS = ("debug", "info", "warning", "error")
_BOTH = argparse.BooleanOptionalAction
_HIDDEN = argparse.SUPPRESS
"""The help of flags that the README alone has."""


def make_parser() -> argparse.ArgumentParser:
    """Every field of EngineConfig is a destination; flags that say nothing leave the field's own default."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxcb.serve",
        usage="python -m jaxcb.serve [MODEL] [options]",
        description="Serve a language model over an HTTP API that clients of OpenAI and Anthropic know.",
        epilog="Every flag can stand in the file of --config (max-model-len: 4096), or in the environment "
        "(JAXCB_MAX_MODEL_LEN=4096). The command line goes first, then the environment, then the file. "
        "The README has more flags: every knob of the scheduler is one.",
        allow_abbrev=False,
        formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=42, width=100),
    )
    parser.set_defaults(**{field.name: field.default for field in dataclasses.fields(EngineConfig)})
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help=_HIDDEN)
    parser.add_argument("--config", metavar="FILE", help="flags as YAML, JSON or TOML")
    _add_model(parser)
    _add_server(parser)
    _add_limits(parser)
    _add_scheduling(parser)
    _add_engine(parser)
    _add_disaggregation(parser)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
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
    model.add_argument("--chat-template", metavar="FILE", help="Jinja instead of the model's own template")
    model.add_argument(
        "--tool-call-parser", default="auto", metavar="NAME", help="auto, none, or a format: hermes, mistral, ..."
    )
    model.add_argument(
        "--reasoning-parser", default="auto", metavar="NAME", help=f"auto, none, {', '.join(REASONING_PARSERS)}"
    )
    model.add_argument("--enable-auto-tool-choice", action="store_true", help=_HIDDEN)  # it always is


def _add_server(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="default 127.0.0.1: this machine only")
    server.add_argument("--port", type=int, default=8000, help="default 8000; 0 takes a free one")
    server.add_argument("--api-key", metavar="KEY", help="every path that takes prompts asks for it")
    server.add_argument("--admin-api-key", metavar="KEY", help="opens /pause, /resume, /log_level, ...")
    server.add_argument("--served-model-name", nargs="+", default=(), metavar="NAME", help="default: the model's name")
    server.add_argument("--allowed-origins", nargs="+", default=(), metavar="URL", help="web pages that may ask; * all")
    server.add_argument("--drain-timeout", type=float, default=30.0, metavar="S", help="default 30 seconds")
    server.add_argument("--log-level", choices=_LOG_LEVELS, default="info")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    limits = parser.add_argument_group("limits and memory")
    limits.add_argument(
        "--tensor-parallel-size", "-tp", type=int, metavar="N", help="devices to cut the model over, on --nnodes hosts"
    )
    limits.add_argument("--nnodes", type=int, help=_HIDDEN)
    limits.add_argument("--node-rank", type=int, help=_HIDDEN)
    limits.add_argument("--dist-init-addr", help=_HIDDEN)
    limits.add_argument("--dist-timeout", type=float, dest="dist_timeout_s", help=_HIDDEN)
    limits.add_argument("--enable-expert-parallel", action="store_true", help=_HIDDEN)
    limits.add_argument("--data-parallel-size", "-dp", type=int, metavar="N", help="engines behind one queue")
    limits.add_argument(
        "--disaggregate", metavar="prefill=N,decode=M", help="prompts and answers on engines of their own"
    )
    limits.add_argument("--max-model-len", type=int, metavar="N", help="most tokens of a prompt and its answer")
    limits.add_argument("--max-num-seqs", type=int, metavar="N", help="most sequences in a step")
    limits.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="most tokens in a step")
    limits.add_argument("--max-waiting", type=int, metavar="N", help="queue length; one more gets 429 (default: none)")
    limits.add_argument("--block-size", "--page-size", type=int, dest="page_size", metavar="N", help="tokens in a page")
    limits.add_argument("--num-kv-pages", type=int, help=_HIDDEN)
    limits.add_argument("--num-gpu-blocks-override", type=int, dest="num_kv_pages", help=_HIDDEN)
    limits.add_argument("--kv-cache-memory-bytes", type=num_bytes, metavar="N", help="of the pool of pages: 512M, 2GiB")
    limits.add_argument("--gpu-memory-utilization", type=float, metavar="F", help="part of a GPU's memory to take")
    limits.add_argument("--host-kv-gib", "--swap-space", type=float, metavar="GIB", help="host memory for KV")
    limits.add_argument("--no-enable-prefix-caching", action="store_false", dest="enable_prefix_caching")
    limits.add_argument("--enable-prefix-caching", action="store_true", help=_HIDDEN)
    limits.add_argument("--kv-cache-dtype", choices=get_args(KVCacheDType), help=_HIDDEN)


def _add_scheduling(parser: argparse.ArgumentParser) -> None:
    """A flag for each of the scheduler's knobs; --help shows those that a server is most often tuned by."""
    group = parser.add_argument_group("scheduling")
    group.add_argument("--policy", choices=tuple(POLICIES), metavar="NAME", help=f"next: {', '.join(POLICIES)}")
    group.add_argument("--preset", metavar="NAME", help="as another system does: vllm-v1, sarathi, tgi, ...")
    group.add_argument("--long-prefill-token-threshold", type=int, metavar="N", help="default: half the budget; 0: off")
    group.add_argument("--itl-target-ms", type=float, metavar="MS", help="time between tokens to hold")
    group.add_argument("--preemption", choices=get_args(Preemption), help="default auto")
    rare = functools.partial(group.add_argument, help=_HIDDEN)
    rare("--scheduling-policy", choices=tuple(POLICIES), dest="policy")
    rare("--reservation", choices=get_args(Reservation))
    rare("--admission-watermark", type=float)
    rare("--length-predictor", choices=("max_tokens", "observed"))
    rare("--priority-ageing-s", "--priority-ageing", type=float)
    rare("--batching", choices=get_args(Batching))
    rare("--victim", choices=get_args(Victim))
    rare("--waiting-served-ratio", type=float)
    for name in ("overtakes", "passes", "chunk-tokens", "num-partial-prefills", "waiting-steps"):
        rare(f"--max-{name}", type=int)
    rare("--prefill-first", action=_BOTH)
    rare("--exact-fill", action=_BOTH)
    rare("--enable-chunked-prefill", action=_BOTH)


def _add_engine(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("engine")
    engine.add_argument("--backend", choices=get_args(Backend), help="kernels; default: by platform")
    engine.add_argument("--no-run-ahead", "--no-async-scheduling", action="store_false", dest="run_ahead")
    engine.add_argument("--run-ahead", "--async-scheduling", action="store_true", help=_HIDDEN)
    engine.add_argument(
        "--deterministic", action="store_true", help="the same bits in any company; costs speed (README)"
    )
    engine.add_argument("--fast-norm", action="store_true", help=_HIDDEN)
    engine.add_argument("--seed", type=int, metavar="N", help="for requests that bring none")
    engine.add_argument("--step-log", metavar="FILE", help=_HIDDEN)
    engine.add_argument("--trace", metavar="FILE", help="of what the engine did when, for Perfetto")
    engine.add_argument("--profile", metavar="DIR", help=_HIDDEN)
    engine.add_argument("--event-log", metavar="FILE", help=_HIDDEN)
    engine.add_argument("--logprobs-mode", type=_logprobs_mode, metavar="MODE", help=_HIDDEN)
    for name in ("--decode-buckets", "--mixed-buckets"):
        engine.add_argument(name, type=int, nargs="*", help=_HIDDEN)
    engine.add_argument("--kv-transfer", action=_BOTH, help=_HIDDEN)


def _add_disaggregation(parser: argparse.ArgumentParser) -> None:
    """Of several processes the README tells."""
    parser.add_argument("--kv-role", choices=("prefill", "decode"), help=_HIDDEN)
    parser.add_argument("--kv-peer", nargs="+", default=(), metavar="HOST:PORT", help=_HIDDEN)
    parser.add_argument("--kv-listen", metavar="HOST:PORT", help=_HIDDEN)
    parser.add_argument("--kv-connector", choices=("shm", "transfer"), help=_HIDDEN)
    parser.add_argument("--kv-secret", default="", metavar="WORD", help=_HIDDEN)


def num_bytes(text: str) -> int:
    """Bytes in "1000", "512M" (10^6) or "2GiB" (2^30)."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"must be bytes, such as 1073741824, 512M or 2GiB; got {text!r}")
    number, letter, binary = match.groups()
    base = 1024 if binary else 1000
    return int(number) * (base ** ("KMGT".index(letter.upper()) + 1) if letter else 1)


def _logprobs_mode(text: str) -> str:
    """vLLM's names have a second word."""
    return text.removesuffix("_logprobs")
