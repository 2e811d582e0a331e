"""Traces: when requests arrive, how long their prompts and answers are. The same seed draws the same trace.

Traces whose prompts share beginnings are in ``shared.py``, recorded ones are read by ``loaders.py``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np

_MASK = 2**64 - 1


class TraceRequest(NamedTuple):
    """One request of a trace.

    A prompt begins with the runs of ``content``, and what they leave of ``num_prompt_tokens`` is its own. Two prompts
    share what they have in common from the first run on:

        content                      num_prompt_tokens
        ((7, 1000), (8, 200))        1250                 1,000 tokens of run 7, 200 of run 8, 50 of its own
        ((7, 1000),)                 1100                 shares the first 1,000
    """

    arrival_s: float
    """Seconds since the trace began; with ``after``, seconds since that request ended."""
    num_prompt_tokens: int
    num_output_tokens: int
    content: tuple[tuple[int, int], ...] = ()
    """Runs (id, number of tokens) that the prompt begins with."""
    answer: int | None = None
    """Id of the run that the answer is: a later turn of the chat names it in its ``content``."""
    after: int | None = None
    """Number of the request that must have ended before this one comes: an earlier one of the trace."""


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

    @property
    def mean(self) -> float:
        return math.exp(self.mu + self.sigma**2 / 2)

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


def drawn_trace(
    workload: Workload, num_requests: int, *, rate: float, gap_cv: float | None, random: np.random.Generator
) -> list[TraceRequest]:
    """Lengths and arrivals of a workload; ``gap_cv`` None takes the workload's own."""
    cv = workload.gap_cv if gap_cv is None else gap_cv
    times = arrivals(num_requests, rate=rate, gap_cv=cv, random=random)
    prompts, outputs = workload.prompt.draw(num_requests, random), workload.output.draw(num_requests, random)
    return [TraceRequest(*values) for values in zip(times, prompts, outputs, strict=True)]


def uniform_trace(
    num_requests: int, *, rate: float, gap_cv: float | None, seed: int, random: np.random.Generator
) -> list[TraceRequest]:
    """Lengths of :func:`uniform_lengths`; Poisson arrivals unless ``gap_cv`` says otherwise."""
    times = arrivals(num_requests, rate=rate, gap_cv=1.0 if gap_cv is None else gap_cv, random=random)
    return [TraceRequest(time, *pair) for time, pair in zip(times, uniform_lengths(num_requests, seed), strict=True)]


def closed_loop(trace: list[TraceRequest], num_users: int, *, think_s: float = 0.0) -> list[TraceRequest]:
    """The same requests from ``num_users``, each of whom sends the next one ``think_s`` after the last was answered."""
    return [
        request._replace(arrival_s=0.0)
        if number < num_users
        else request._replace(arrival_s=think_s, after=number - num_users)
        for number, request in enumerate(trace)
    ]


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
