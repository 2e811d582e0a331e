"""Flags that stand elsewhere than on the command line: in a file, in the environment. They become arguments, so that
they are checked as those are, and say the same."""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxcb.errors import ConfigError

PREFIX = "JAXCB_"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def arguments_of_file(parser: argparse.ArgumentParser, file: str) -> list[str]:
    """The arguments that a YAML, JSON or TOML file stands for.

    Raises:
        ConfigError: it can't be read, or holds something that is no flag.
    """
    values = _read(Path(file))
    if not isinstance(values, dict):
        raise ConfigError(f"--config: {file} must map flags to values, got {type(values).__name__}", param="config")
    actions = _flags(parser)
    arguments: list[str] = []
    for name, value in values.items():
        flag = "--" + str(name).replace("_", "-")
        action = actions.get(flag)
        if action is None or action.dest in ("help", "config"):
            raise ConfigError(f"--config: {file}: there is no flag {flag}", param="config")
        arguments += _arguments(actions, flag, value, f"--config: {file}: {name}")
    return arguments


def arguments_of_environment(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> list[str]:
    """The arguments that the environment stands for: ``JAXCB_PORT=80`` is ``--port 80``. Several values have spaces
    between them. Other variables with the prefix are not ours to judge.

    Raises:
        ConfigError: a switch is neither on nor off.
    """
    arguments: list[str] = []
    actions = _flags(parser)
    for flag, action in actions.items():
        name = PREFIX + flag.removeprefix("--").replace("-", "_").upper()
        text = environment.get(name)
        if text is None or action.dest == "help":
            continue
        value: Any = text
        if action.nargs == 0:
            if text.lower() not in (*_TRUE, *_FALSE):
                raise ConfigError(f"{name} must be 1 or 0, got {text!r}", param=action.dest)
            value = text.lower() in _TRUE
        elif action.nargs in ("+", "*"):
            value = text.split()
        arguments += _arguments(actions, flag, value, name)
    return arguments


def _flags(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {flag: action for action in parser._actions for flag in action.option_strings if flag.startswith("--")}


def _arguments(actions: Mapping[str, argparse.Action], flag: str, value: Any, where: str) -> list[str]:
    action = actions[flag]
    if value is None:
        return []
    if action.nargs == 0:
        return _switch(actions, flag, value, where)
    if action.nargs in ("+", "*"):
        items = value if isinstance(value, list) else [value]
        return [flag, *map(str, items)]
    if isinstance(value, dict | list | bool):
        raise ConfigError(f"{where} must be one value, got {value!r}", param=action.dest)
    return [f"{flag}={value}"]


def _switch(actions: Mapping[str, argparse.Action], flag: str, value: Any, where: str) -> list[str]:
    """A switch that is off is its negation, or (where there is none) nothing."""
    if not isinstance(value, bool):
        raise ConfigError(f"{where} must be true or false, got {value!r}", param=actions[flag].dest)
    if value:
        return [flag]
    negated = flag.replace("--no-", "--", 1) if flag.startswith("--no-") else flag.replace("--", "--no-", 1)
    return [negated] if negated in actions else []


def _read(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            return tomllib.loads(text)
        if path.suffix == ".json":
            return json.loads(text)
        if path.suffix in (".yaml", ".yml"):
            return _read_yaml(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config: can't read {path}: {error}", param="config") from error
    raise ConfigError(f"--config: {path} must end with .yaml, .yml, .json or .toml", param="config")


def _read_yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
