"""The command line, the environment and the config file, turned into an EngineConfig and the server's own options."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxcb.config import EngineConfig
from jaxcb.errors import ConfigError
from jaxcb.presets import engine_settings
from jaxcb.serve.disaggregation import Disaggregation, disaggregation_of
from jaxcb.serve.flags import make_parser
from jaxcb.serve.settings import arguments_of_environment, arguments_of_file


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
    admin_api_key: str | None
    served_model_names: tuple[str, ...]
    allowed_origins: tuple[str, ...]
    chat_template: str | None
    tool_call_parser: str
    reasoning_parser: str
    drain_timeout_s: float
    log_level: str
    profile: str | None
    disaggregation: Disaggregation


def parse(
    argv: Sequence[str] | None = None, environment: Mapping[str, str] | None = None
) -> tuple[EngineConfig, ServeOptions]:
    """Read the command line; argparse ends the process (status 2) on flags it can't read.

    Arguments:
        argv: default: those of the process.
        environment: default: that of the process.

    Raises:
        ConfigError: a value can't work.
    """
    parser = make_parser()
    argv = _with_other_sources(parser, argv, os.environ if environment is None else environment)
    known, _ = _early_parser().parse_known_args(argv)
    if known.preset is not None:
        parser.set_defaults(**engine_settings(known.preset))  # so that the other flags stand over it
    args = parser.parse_args(argv)
    if args.model_tag is not None:
        if args.model is not None:
            raise ConfigError(f"the model is given twice: {args.model_tag} and {args.model}", param="model")
        args.model = args.model_tag
    config = EngineConfig(**{field.name: getattr(args, field.name) for field in dataclasses.fields(EngineConfig)})
    _check(args)
    return config, ServeOptions(
        host=args.host,
        port=args.port,
        api_key=args.api_key,
        admin_api_key=args.admin_api_key,
        served_model_names=tuple(args.served_model_name),
        allowed_origins=_origins(args.allowed_origins),
        chat_template=None if args.chat_template is None else _read_template(args.chat_template),
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        drain_timeout_s=args.drain_timeout,
        log_level=args.log_level,
        profile=args.profile,
        disaggregation=disaggregation_of(args),
    )


def _early_parser() -> argparse.ArgumentParser:
    """Reads the flags that change how the others are read, and nothing else."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preset")
    parser.add_argument("--config")
    return parser


def _with_other_sources(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, environment: Mapping[str, str]
) -> list[str]:
    """The arguments with those of the file and the environment before them: the last one holds."""
    own = list(sys.argv[1:] if argv is None else argv)
    from_environment = arguments_of_environment(parser, environment)
    file = _early_parser().parse_known_args([*from_environment, *own])[0].config
    from_file = [] if file is None else arguments_of_file(parser, file)
    # A positional argument goes first: behind a flag that takes several values it would be one of them.
    split = 1 if own and not own[0].startswith("-") else 0
    return [*own[:split], *from_file, *from_environment, *own[split:]]


def _check(args: argparse.Namespace) -> None:
    if not math.isfinite(args.drain_timeout) or args.drain_timeout < 0:
        raise ConfigError(f"--drain-timeout must be 0 or more seconds, got {args.drain_timeout}", param="drain_timeout")
    if not 0 <= args.port < 65536:
        raise ConfigError(f"--port must be in [0, 65535], got {args.port}", param="port")
    for name in ("api_key", "admin_api_key"):
        key = getattr(args, name)
        if key is not None and not (key.isascii() and key.isprintable() and key):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} must be a non-empty string of printable ASCII characters", param=name)
    if args.admin_api_key is not None and args.admin_api_key == args.api_key:
        raise ConfigError("--admin-api-key must be another one than --api-key", param="admin_api_key")


def _origins(values: Sequence[str]) -> tuple[str, ...]:
    """vLLM takes a JSON list."""
    if len(values) == 1 and values[0].startswith("["):
        try:
            return tuple(map(str, json.loads(values[0])))
        except ValueError as error:
            raise ConfigError(
                f"--allowed-origins: {values[0]} is not JSON: {error}", param="allowed_origins"
            ) from error
    return tuple(values)


def _read_template(file: str) -> str:
    """A file, or (as in vLLM) the template itself."""
    if "{{" in file or "{%" in file:
        return file
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template: can't read {file}: {error}", param="chat_template") from error
