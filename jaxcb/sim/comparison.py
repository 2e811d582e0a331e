"""compare(): many systems on one trace, with the same cards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxcb.presets import PRESETS
from jaxcb.sim.clusters import Cluster, Machine, cluster_of, longest
from jaxcb.sim.gpus import GPUS
from jaxcb.sim.models import MODELS
from jaxcb.sim.result import Distribution, Result
from jaxcb.sim.simulator import Simulation
from jaxcb.sim.trace import TraceRequest

PAGE_MULTIPLE = 128
"""The context of a comparison is rounded up to so many tokens: a whole number of pages of any size."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Promises that goodput counts."""

    ttft_s: float = 1.0
    tpot_s: float = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One system's run."""

    name: str
    result: Result
    limits: Limits
    usd_per_hour: float | None
    watts: float

    @property
    def goodput(self) -> float:
        """Requests a second that ended within the limits."""
        return self.result.goodput(ttft_s=self.limits.ttft_s, tpot_s=self.limits.tpot_s)

    @property
    def good_part(self) -> float:
        """Part of all requests that ended within the limits."""
        met = sum(record.met(self.limits.ttft_s, self.limits.tpot_s) for record in self.result.requests)
        return met / len(self.result.requests) if self.result.requests else 0.0

    @property
    def usd_per_million_tokens(self) -> float | None:
        """Rent for a million output tokens."""
        rate = self.result.output_tokens_per_s
        return None if self.usd_per_hour is None or not rate else self.usd_per_hour / 3600 / rate * 1e6

    def summary(self) -> dict[str, Any]:
        """The table's row, ready for JSON."""
        result = self.result
        times = {"ttft_s": result.ttft, "tpot_s": result.tpot, "itl_s": result.itl, "latency_s": result.latency}
        return {
            "preset": self.name,
            "output_tokens_per_s": result.output_tokens_per_s,
            "requests_per_s": result.requests_per_s,
            "goodput": self.goodput,
            "good_part": self.good_part,
            "num_finished": len(result.finished),
            "num_refused": result.num_refused,
            "num_rejected": result.num_rejected,
            "num_preemptions": result.num_preemptions,
            "mean_kv_use": result.mean_kv_use,
            "kv_waste": result.kv_waste,
            "prefix_hit_rate": result.prefix_hit_rate,
            "usd_per_million_tokens": self.usd_per_million_tokens,
            "watts": self.watts,
            **{name: _as_dict(time) for name, time in times.items()},
        }


def compare(
    presets: Sequence[str],
    trace: Sequence[TraceRequest],
    machine: Machine | None = None,
    *,
    limits: Limits | None = None,
    given: Mapping[str, Any] | None = None,
    drive: Callable[[str, Simulation], bool] | None = None,
) -> list[Row]:
    """Run each preset on the trace.

    A system of one engine runs on each of the machine's cards, requests going to the least loaded; one of separate
    pools divides the cards. All get the same ``max_model_len``, the longest request of the trace, unless it is given.

    Arguments:
        presets: names out of ``PRESETS``.
        machine: default: the 8B model on two H100.
        limits: of goodput, and of early rejection where a system has it.
        given: fields of EngineConfig that stand over every preset's.
        drive: runs a simulation to its end, with a progress bar, say; False: interrupted, which ends the comparison.

    Raises:
        ConfigError: there is no such preset, or the machine can't run it.
    """
    machine = machine or Machine(model=MODELS["8b"], gpu=GPUS["h100"], num_gpus=2)
    return list(rows(presets, trace, machine, limits=limits, given=given, drive=drive))


def rows(
    presets: Sequence[str],
    trace: Sequence[TraceRequest],
    machine: Machine,
    *,
    limits: Limits | None = None,
    given: Mapping[str, Any] | None = None,
    drive: Callable[[str, Simulation], bool] | None = None,
) -> Iterator[Row]:
    """As :func:`compare`, one after the other."""
    limits = limits or Limits()
    for name, cluster in clusters(presets, trace, machine, limits, given):
        simulation = cluster.simulation(trace)
        done = (drive or _drive)(name, simulation)
        yield Row(
            name=name,
            result=simulation.result(),
            limits=limits,
            usd_per_hour=cluster.usd_per_hour,
            watts=cluster.watts,
        )
        if not done:
            return


def clusters(
    presets: Sequence[str],
    trace: Sequence[TraceRequest],
    machine: Machine,
    limits: Limits,
    given: Mapping[str, Any] | None,
) -> list[tuple[str, Cluster]]:
    """All of them before the first runs, so that what can't work is said at once."""
    length = -(-longest(trace) // PAGE_MULTIPLE) * PAGE_MULTIPLE
    settings = {"max_model_len": min(length, machine.model.max_position), **(given or {})}
    return [(name, cluster_of(name, machine, given=settings, ttft_limit_s=limits.ttft_s)) for name in presets]


def default_presets(num_gpus: int) -> list[str]:
    """All that so many cards can run."""
    return [name for name, preset in PRESETS.items() if preset.pools is None or num_gpus > 1]


def _drive(_name: str, simulation: Simulation) -> bool:
    while simulation.step():
        pass
    return True


def _as_dict(times: Distribution | None) -> dict[str, float] | None:
    return None if times is None else dataclasses.asdict(times)
