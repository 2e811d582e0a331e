"""LogitsProcessor: a function of the user's own over a step's logits, with a state for each request. No jax here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxcb import validation
from jaxcb.errors import ConfigError, RequestError

State = Any
"""A pytree: a numpy array, or tuples, lists and dicts of them."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LogitsProcessor:
    """Compiled into the sampler when the engine starts (``EngineConfig(logits_processors=(...))``).

    It sees the model's own logits, after a grammar's mask and before everything else that
    :class:`jaxcb.sampling_params.SamplingParams` does to them. Several work one after the other.

    Arguments:
        blank: a state of one request: it says which shapes and dtypes all have.
        start: (``SamplingParams.extra_args``, token ids of the prompt) -> the state before the first token, or None for
            requests that it leaves alone. Runs on the host, where the request is submitted; ValueError refuses it.
        apply: (logits float32[S, V], states with a leading axis S) -> logits float32[S, V]. A jax function of rows: row
            i may depend on row i alone.
        update: (states with a leading axis S, sampled token ids int32[S]) -> the states for the next token; None where
            they don't change. A jax function of rows.
        arguments: names of ``extra_args`` that ``start`` reads. Others are refused.
    """

    blank: State
    start: Callable[[Mapping[str, Any], Sequence[int]], State | None]
    apply: Callable[[Any, State], Any]
    update: Callable[[State, Any], State] | None = None
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("start", "apply"):
            if not callable(getattr(self, name)):
                raise ConfigError(f"{name} of a LogitsProcessor must be a function", param="logits_processors")
        if isinstance(self.arguments, str):
            raise ConfigError("arguments of a LogitsProcessor must be a tuple of names", param="logits_processors")


def check_extra_args(processors: Sequence[LogitsProcessor], extra_args: Mapping[str, Any] | None) -> None:
    """Raise RequestError if ``extra_args`` holds a name that no processor reads."""
    known = {name for processor in processors for name in processor.arguments}
    for name in extra_args or ():
        if name not in known:
            reads = (
                f"the logits processors read {', '.join(sorted(known))}" if known else "no logits processor reads any"
            )
            raise RequestError(f"extra_args has no field {validation.shown(name)}: {reads}", param="extra_args")


def start_states(
    processors: Sequence[LogitsProcessor], extra_args: Mapping[str, Any] | None, prompt: Sequence[int]
) -> tuple[State | None, ...]:
    """The state of a request for each processor, None where it is left alone.

    Raises:
        RequestError: a processor refuses the request, or makes a state of another shape than its ``blank``.
    """
    return tuple(_started(processor, extra_args or {}, prompt) for processor in processors)


def _started(processor: LogitsProcessor, extra_args: Mapping[str, Any], prompt: Sequence[int]) -> State | None:
    try:
        state = processor.start(extra_args, prompt)
    except (ValueError, TypeError, LookupError) as error:
        raise RequestError(f"a logits processor refused the request: {error}", param="extra_args") from error
    return None if state is None else _like(processor.blank, state)


def _like(blank: State, state: State) -> State:
    """The state in the shapes and dtypes of ``blank``."""
    if isinstance(blank, dict):
        _check(isinstance(state, dict) and blank.keys() == state.keys(), blank, state)
        return {name: _like(blank[name], state[name]) for name in blank}
    if isinstance(blank, tuple | list):
        _check(isinstance(state, tuple | list) and len(blank) == len(state), blank, state)
        parts = [_like(one, other) for one, other in zip(blank, state, strict=True)]
        return type(blank)(*parts) if hasattr(blank, "_fields") else type(blank)(parts)
    wanted, given = np.asarray(blank), np.asarray(state)
    _check(wanted.shape == given.shape and np.can_cast(given.dtype, wanted.dtype, "same_kind"), wanted, given)
    return given.astype(wanted.dtype)


def _check(fits: bool, blank: object, state: object) -> None:
    if not fits:
        raise RequestError(
            f"the state that a logits processor started with, {validation.shown(state)}, has not the shape of its "
            f"blank one, {validation.shown(blank)}",
            param="extra_args",
        )
