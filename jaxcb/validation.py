"""Checks of single values that users give: type and range, with an error that names the field. Numpy scalars pass."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Sequence
from typing import Any

from jaxcb.errors import ConfigError, RequestError

Error = type[ConfigError] | type[RequestError]


def integer(name: str, value: object, *, low: int, high: int | None = None, error: Error = RequestError) -> int:
    """``value`` as an int within [low, high].

    Raises:
        error: it is no integer (a bool is none) or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int | numbers.Integral):
        raise error(f"{name} must be an integer, got {shown(value)}", param=name)
    number = int(value)
    if number < low or (high is not None and number > high):
        limit = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise error(f"{name} must be {limit}, got {shown(number)}", param=name)
    return number


def number(name: str, value: object, *, low: float, high: float, error: Error = RequestError) -> float:
    """``value`` as a finite float within [low, high].

    Raises:
        error: it is no finite number or out of range.
    """
    if type(value) in (int, float) and low <= value <= high:  # type: ignore[operator]  # asking an ABC takes its time
        return float(value)  # type: ignore[arg-type]  # as above
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not _finite(value):
        raise error(f"{name} must be a finite number, got {shown(value)}", param=name)
    if not low <= float(value) <= high:
        raise error(f"{name} must be in [{low:g}, {high:g}], got {shown(value)}", param=name)
    return float(value)


def boolean(name: str, value: object, *, error: Error = RequestError) -> bool:
    """``value`` if it is True or False.

    Raises:
        error: it is anything else.
    """
    if not isinstance(value, bool):
        raise error(f"{name} must be true or false, got {shown(value)}", param=name)
    return value


def token_ids(name: str, value: object) -> list[int]:
    """A list of our own of the ids in a list, tuple, range or one-dimensional integer array.

    Raises:
        RequestError: it is something else, or holds something that is no integer.
    """
    if hasattr(value, "__array__"):
        value = _tolist(name, value)
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
        raise RequestError(f"{name} must be a list of token ids, got {shown(value)}", param=name)
    if set(map(type, value)) <= {int}:  # the usual case, at the speed of C: prompts are long
        return list(value)
    ids = []
    for item in value:
        if isinstance(item, bool) or not isinstance(item, numbers.Integral):
            raise RequestError(f"{name} must hold integers, got {shown(item)}", param=name)
        ids.append(int(item))
    return ids


def check_vocabulary(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raise RequestError unless every id is one of the model's."""
    ids = list(ids)
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise RequestError(
            f"{name} holds token id {wrong}; the model's vocabulary has ids 0 to {vocab_size - 1}", param=name
        )


def shown(value: object, limit: int = 80) -> str:
    """The value as an error shows it: whatever was given, briefly."""
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python prints
        text = f"an {type(value).__name__} too large to show"
    return text if len(text) <= limit else f"{text[:limit]}..."


def _finite(value: numbers.Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond float's range
        return False


def _tolist(name: str, value: Any) -> object:
    array = value.__array__()
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise RequestError(
            f"{name} must be a one-dimensional array of integers, got shape {array.shape} of {array.dtype}", param=name
        )
    return array.tolist()
