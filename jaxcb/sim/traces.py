"""Traces by name: the drawn ones, and files."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxcb.errors import ConfigError
from jaxcb.sim import shared
from jaxcb.sim.loaders import SUFFIXES, load_trace
from jaxcb.sim.trace import UNIFORM, WORKLOADS, TraceRequest, closed_loop, drawn_trace, uniform_trace

_SHARED: dict[str, Callable[..., list[TraceRequest]]] = {
    "bursts": shared.bursts,
    "shared-prefix": shared.shared_prefix,
    "multi-turn": shared.multi_turn,
    "few-shot-tree": shared.few_shot_tree,
}
TRACES = (*WORKLOADS, UNIFORM, *_SHARED)


def make_trace(
    name: str,
    num_requests: int | None = None,
    *,
    rate: float | None = None,
    gap_cv: float | None = None,
    num_users: int | None = None,
    seed: int = 42,
) -> list[TraceRequest]:
    """Draw a trace, or read one.

    Arguments:
        name: one of ``TRACES``, or a file that :func:`jaxcb.sim.loaders.load_trace` reads.
        num_requests: how many; default 1,000, of a file all.
        rate: mean arrivals a second; infinite: all are there at the start. Default: infinite, for a file its own times.
        gap_cv: standard deviation of the gaps between arrivals over their mean (they are gamma distributed): 1 is a
            Poisson process, more is bursts. Default: the workload's own.
        num_users: a closed loop instead of a rate: so many users, each of whom waits for an answer before he goes on.

    Raises:
        ConfigError: a value can't work, or the file can't be read; ``.param`` names the argument.
    """
    _check(num_requests, rate, gap_cv, num_users)
    random = np.random.default_rng(seed)
    if name.endswith(SUFFIXES):
        trace = _from_file(Path(name), num_requests, rate, gap_cv, random)
    else:
        trace = _drawn(name, num_requests or 1000, rate or math.inf, gap_cv, seed, random)
    if num_users is None:
        return trace
    if any(request.after is not None for request in trace):
        raise ConfigError(f"{name} has users of its own, who wait for answers: leave num_users out", param="num_users")
    return closed_loop(trace, num_users)


def _drawn(
    name: str, count: int, rate: float, gap_cv: float | None, seed: int, random: np.random.Generator
) -> list[TraceRequest]:
    if name in WORKLOADS:
        return drawn_trace(WORKLOADS[name], count, rate=rate, gap_cv=gap_cv, random=random)
    if name == UNIFORM:
        return uniform_trace(count, rate=rate, gap_cv=gap_cv, seed=seed, random=random)
    if name in _SHARED:
        return _SHARED[name](count, rate=rate, gap_cv=1.0 if gap_cv is None else gap_cv, random=random)
    raise ConfigError(
        f"trace must be one of {', '.join(TRACES)}, or a file that ends in {' or '.join(SUFFIXES)}; got {name!r}",
        param="trace",
    )


def _from_file(
    file: Path, count: int | None, rate: float | None, gap_cv: float | None, random: np.random.Generator
) -> list[TraceRequest]:
    trace = load_trace(file, rate=rate, gap_cv=gap_cv, random=random)
    return trace if count is None else trace[:count]


def _check(num_requests: int | None, rate: float | None, gap_cv: float | None, num_users: int | None) -> None:
    for name, count in (("num_requests", num_requests), ("num_users", num_users)):
        if count is not None and count < 1:
            raise ConfigError(f"{name} must be at least 1, got {count}", param=name)
    if rate is not None and not rate > 0:
        raise ConfigError(f"rate must be positive (requests a second) or inf, got {rate}", param="rate")
    if gap_cv is not None and not 0 < gap_cv < math.inf:
        raise ConfigError(f"gap_cv must be positive, got {gap_cv}", param="gap_cv")
    if num_users is not None and (rate is not None or gap_cv is not None):
        raise ConfigError(
            "num_users is a closed loop, whose arrivals follow the answers: leave rate and gap_cv out",
            param="num_users",
        )
