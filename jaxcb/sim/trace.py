"""Traces: when requests arrive, how long their prompts and answers are. The same seed draws the same trace."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from jaxcb.errors import ConfigError

_MASK = 2**64 - 1


class TraceRequest(NamedTuple):
    """One request of a trace."""

    arrival_s: float
    """Seconds since the trace began."""
    num_prompt_tokens: int
    num_output_tokens: int


class Lcg:
    """Knuth's 64-bit linear congruential generator (MMIX): the same numbers in every language."""

    def __init__(self, seed: int):
        self._state = seed & _MASK

    def between(self, low: int, high: int) -> int:
        """An integer in [low, high)."""
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) & _MASK
        return low + (self._state >> 33) % (high - low)


@dataclasses.dataclass(frozen=True)
class Lognormal:
    """Lengths whose logarithm has mean ``mu`` and standard deviation ``sigma``; the median is exp(mu)."""

    mu: float
    sigma: float

    @classmethod
    def from_percentiles(cls, p50: float, p90: float) -> Lognormal:
        """The distribution with these percentiles; 1.2816 standard deviations lie between the two."""
        return cls(math.log(p50), math.log(p90 / p50) / 1.2815515655446004)

    def draw(self, count: int, random: np.random.Generator) -> list[int]:
        """``count`` lengths, each at least 1."""
        return np.maximum(np.rint(random.lognormal(self.mu, self.sigma, count)), 1).astype(int).tolist()


@dataclasses.dataclass(frozen=True)
class Workload:
    """Distributions of a published trace. ``gap_cv``: standard deviation of the gaps between arrivals over their mean;
    1 is a Poisson process, more is bursts."""

    prompt: Lognormal
    output: Lognormal
    gap_cv: float = 1.0


# Azure: fits to the two traces of the Azure LLM inference data set 2023 (Splitwise). ShareGPT-like: by percentiles.
WORKLOADS = {
    "sharegpt": Workload(Lognormal.from_percentiles(150, 796), Lognormal.from_percentiles(140, 555)),
    "azure-conv": Workload(Lognormal(6.63, 0.99), Lognormal(5.02, 0.86), gap_cv=1.1),
    "azure-code": Workload(Lognormal(7.00, 1.36), Lognormal(2.79, 0.85), gap_cv=13.0),
}
UNIFORM = "uniform"
TRACES = (*WORKLOADS, UNIFORM)


def make_trace(name: str, num_requests: int, *, rate: float = math.inf, seed: int = 42) -> list[TraceRequest]:
    """Draw a trace.

    Arguments:
        name: one of ``TRACES``; "uniform" has the lengths of :func:`uniform_lengths` and Poisson arrivals.
        rate: mean arrivals a second; infinite: all are there at the start.

    Raises:
        ConfigError: a value can't work; ``.param`` names it.
    """
    if name not in TRACES:
        raise ConfigError(f"trace must be one of {', '.join(TRACES)}, got {name!r}", param="trace")
    if num_requests < 1:
        raise ConfigError(f"num_requests must be at least 1, got {num_requests}", param="num_requests")
    if not rate > 0:
        raise ConfigError(f"rate must be positive (requests a second) or inf, got {rate}", param="rate")
    random = np.random.default_rng(seed)
    workload = WORKLOADS.get(name)
    times = arrivals(num_requests, rate=rate, gap_cv=1.0 if workload is None else workload.gap_cv, random=random)
    if workload is None:
        lengths = uniform_lengths(num_requests, seed)
    else:
        prompts, outputs = workload.prompt.draw(num_requests, random), workload.output.draw(num_requests, random)
        lengths = list(zip(prompts, outputs, strict=True))
    return [TraceRequest(time, *pair) for time, pair in zip(times, lengths, strict=True)]


def uniform_lengths(num_requests: int, seed: int = 42) -> list[tuple[int, int]]:
    """Prompts of 50 to 999 tokens and outputs of 10 to 999, uniform; each prompt is drawn before its output."""
    lcg = Lcg(seed)
    return [(lcg.between(50, 1000), lcg.between(10, 1000)) for _ in range(num_requests)]


def arrivals(num_requests: int, *, rate: float, gap_cv: float, random: np.random.Generator) -> list[float]:
    """Arrival times in seconds: gaps are gamma distributed with mean 1 / rate; the first request comes at 0."""
    if math.isinf(rate):
        return [0.0] * num_requests
    shape = gap_cv**-2
    gaps = random.gamma(shape, 1 / (rate * shape), num_requests - 1)
    return [0.0, *np.cumsum(gaps).tolist()]
