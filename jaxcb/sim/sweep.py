"""sweep(): one system over token budgets and batch sizes, and which of them nobody beats."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxcb.config import EngineConfig
from jaxcb.sim.clusters import Machine, cluster_of, own_cluster
from jaxcb.sim.comparison import Limits
from jaxcb.sim.result import Result
from jaxcb.sim.simulator import Simulation
from jaxcb.sim.trace import TraceRequest

BUDGETS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
SEQS = (16, 64, 256)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One setting's run."""

    budget: int
    num_seqs: int
    result: Result
    limits: Limits

    @property
    def tokens_per_s(self) -> float:
        return self.result.output_tokens_per_s

    @property
    def itl_p99_s(self) -> float:
        """What 99% of the gaps between tokens stay within; 0 if there are none."""
        return self.result.itl.p99 if self.result.itl is not None else 0.0

    @property
    def goodput(self) -> float:
        """Requests a second within the limits."""
        return self.result.goodput(ttft_s=self.limits.ttft_s, tpot_s=self.limits.tpot_s)

    def summary(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "max_num_batched_tokens": self.budget,
            "max_num_seqs": self.num_seqs,
            "goodput": self.goodput,
            **self.result.summary(),
        }


def sweep(
    grid: Sequence[tuple[int, int]],
    trace: Sequence[TraceRequest],
    machine: Machine,
    *,
    preset: str | None = None,
    given: Mapping[str, Any] | None = None,
    limits: Limits | None = None,
    drive: Callable[[str, Simulation], bool],
) -> Iterator[Point]:
    """A point for each (token budget, sequences a step). Arguments as for :func:`jaxcb.sim.compare`."""
    clusters = []
    for budget, seqs in grid:
        settings = {**(given or {}), "max_num_batched_tokens": budget, "max_num_seqs": seqs}
        if preset is None:
            clusters.append(own_cluster(machine, EngineConfig(**settings)))
        else:
            clusters.append(cluster_of(preset, machine, given=settings))
    for (budget, seqs), cluster in zip(grid, clusters, strict=True):
        simulation = cluster.simulation(trace)
        done = drive(f"budget {budget}, {seqs} sequences", simulation)
        yield Point(budget=budget, num_seqs=seqs, result=simulation.result(), limits=limits or Limits())
        if not done:
            return


def front(points: Sequence[Point]) -> list[Point]:
    """Those that no other beats in both throughput and p99 of the time between tokens, fastest gaps first."""
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.itl_p99_s, -point.tokens_per_s)):
        if not best or point.tokens_per_s > best[-1].tokens_per_s:
            best.append(point)
    return best
