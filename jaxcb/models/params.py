"""A model's parameters: a nested dict of arrays, whose parts :mod:`jaxcb.models.decoder` names. Imports no jax."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Params = dict[str, Any]
Path = tuple[Any, ...]
"""Names and numbers of layers that lead to a parameter, e.g. ("layers", 3, "qkv", "kernel")."""


def insert(params: dict[Any, Any], path: Path, value: Any) -> None:
    """Put ``value`` at ``path`` of the nested dict ``params``."""
    for key in path[:-1]:
        params = params.setdefault(key, {})
    params[path[-1]] = value


def lookup(params: Mapping[Any, Any], path: Path) -> Any:
    """The value at ``path`` of the nested dict ``params``."""
    value: Any = params
    for key in path:
        value = value[key]
    return value


def flatten(params: Mapping[Any, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every parameter with its path."""
    for key, value in params.items():
        if isinstance(value, Mapping):
            yield from flatten(value, (*path, key))
        else:
            yield (*path, key), value
