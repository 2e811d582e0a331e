"""A trace on one engine or on many: real Schedulers under one virtual clock.

Each replica has its own clock, the time of its next decision. The one that is furthest behind goes next, after all
events up to its time: whatever it decides, it knows all that has happened by then, and nothing that happens later.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

from jaxcb.errors import ConfigError, RequestError
from jaxcb.request import Request
from jaxcb.scheduler import Scheduler, SchedulerLimits, Sequence
from jaxcb.sim.arrivals import Arrivals, answer_token, request_of
from jaxcb.sim.replica import Gaps, OnPlan, Padding, Replica, ReplicaSpec
from jaxcb.sim.result import RequestRecord, Result
from jaxcb.sim.step_time import StepTime
from jaxcb.sim.trace import TraceRequest


class Placement(Protocol):
    """Which replica does what. The simulation calls it; it calls the simulation's methods."""

    def arrived(self, simulation: Simulation, number: int, now_s: float) -> None:
        """Request ``number`` has come: hand it to a replica, or turn it away."""

    def ended(self, simulation: Simulation, replica: Replica, sequence: Sequence, record: RequestRecord) -> None:
        """A sequence has ended on a replica, at its ``now_s``: the request is done, or goes on elsewhere."""


class Spread:
    """Equal replicas; a request goes to the one with the fewest tokens before it."""

    def arrived(self, simulation: Simulation, number: int, now_s: float) -> None:
        replicas = simulation.replicas
        replica = replicas[0] if len(replicas) == 1 else min(replicas, key=lambda replica: replica.num_open_tokens)
        simulation.submit(replica, number, now_s)

    def ended(self, simulation: Simulation, replica: Replica, sequence: Sequence, record: RequestRecord) -> None:
        simulation.finished(record, replica.now_s)


class Simulation:
    """A run that is stepped, so that a caller can watch it or stop in the middle.

    Arguments:
        specs: the replicas.
        trace: requests in the order of their arrivals. Each gets exactly the output length it asks for; one that the
            scheduler refuses is marked so and left out.
        placement: which replica does what; default: any does all.

    Raises:
        ConfigError: the trace isn't in order, or a sequence of ``max_model_len`` tokens doesn't fit the KV pages.
    """

    def __init__(self, specs: Seq[ReplicaSpec], trace: Seq[TraceRequest], placement: Placement | None = None):
        for spec in specs:
            _check_capacity(spec.limits)
        self.records = [RequestRecord.of(number, request) for number, request in enumerate(trace)]
        self.trace = trace
        self.num_done = 0
        """Requests that have ended, were refused or turned away."""
        self._placement: Placement = placement or Spread()
        self._arrivals = Arrivals(trace)
        self._gaps = Gaps()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._event_numbers = itertools.count()
        self._started_s = self._arrivals.next_s if trace else 0.0
        self.replicas = [Replica(spec, self._gaps, self._started_s, self._ended) for spec in specs]

    @property
    def scheduler(self) -> Scheduler:
        """Of the first replica."""
        return self.replicas[0].scheduler

    @property
    def now_s(self) -> float:
        """The virtual clock: the latest time that any replica has reached."""
        return max(replica.now_s for replica in self.replicas)

    def step(self) -> bool:
        """Let one replica make its next step, after everything that happens before it. Returns False when the trace is
        done."""
        while True:
            replica = self.replicas[0] if len(self.replicas) == 1 else min(self.replicas, key=_next_s)
            arrival_s, event_s = self._arrivals.next_s, self._events[0][0] if self._events else math.inf
            if min(arrival_s, event_s) > replica.next_s or (arrival_s == event_s == math.inf):
                break
            if event_s <= arrival_s:
                at_s, _, action = heapq.heappop(self._events)
                action(at_s)
            else:
                arrived_s, number = self._arrivals.pop()
                self.records[number].arrival_s = arrived_s
                self._placement.arrived(self, number, arrived_s)
        if replica.next_s == math.inf:
            return False
        replica.step()
        return True

    def result(self) -> Result:
        """What was done so far."""
        return Result.of(self.records, self._gaps, self.replicas, self.now_s - self._started_s)

    # ------------------------------------------------------------------ for placements

    def at(self, time_s: float, action: Callable[[float], None]) -> None:
        """Call ``action(time_s)`` at that time."""
        heapq.heappush(self._events, (time_s, next(self._event_numbers), action))

    def submit(self, replica: Replica, number: int, now_s: float, request: Request | None = None) -> None:
        """Queue request ``number`` on a replica, or what is left of it (``request``)."""
        asked_for, record = self.trace[number], self.records[number]
        request = request or request_of(number, asked_for, record.arrival_s)
        try:
            replica.add(request, record, now_s, answer_token(asked_for))
        except RequestError:
            record.refused = True
            self._done(record, now_s)

    def reject(self, record: RequestRecord, now_s: float) -> None:
        """Turn a request away."""
        record.rejected = True
        self._done(record, now_s)

    def finished(self, record: RequestRecord, now_s: float) -> None:
        """The last token of a request is there."""
        record.finished_s = now_s
        self._done(record, now_s)

    def _done(self, record: RequestRecord, now_s: float) -> None:
        self.num_done += 1
        self._arrivals.ended(record.number, now_s)

    def _ended(self, replica: Replica, sequence: Sequence, record: RequestRecord) -> None:
        self._placement.ended(self, replica, sequence, record)


def one_engine(
    limits: SchedulerLimits,
    trace: Seq[TraceRequest],
    step_time: StepTime,
    *,
    run_ahead: bool = True,
    padding: Padding | None = None,
    on_plan: OnPlan | None = None,
) -> Simulation:
    """A simulation of one engine; arguments as for :class:`Simulation` and :class:`ReplicaSpec`."""
    spec = ReplicaSpec(limits=limits, step_time=step_time, run_ahead=run_ahead, padding=padding, on_plan=on_plan)
    return Simulation([spec], trace)


def simulate(
    limits: SchedulerLimits, trace: Seq[TraceRequest], step_time: StepTime, *, run_ahead: bool = True
) -> Result:
    """Run a trace on one engine to its end."""
    simulation = one_engine(limits, trace, step_time, run_ahead=run_ahead)
    run(simulation)
    return simulation.result()


def run(simulation: Simulation, on_step: Callable[[], object] | None = None) -> None:
    """Step to the end. ``on_step`` is called after each step.

    Without the garbage collector: a run makes millions of objects that no cycle keeps alive, and the collector would
    look through all open requests again and again (a quarter of the time).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        while simulation.step():
            if on_step is not None:
                on_step()
    finally:
        if was_enabled:
            gc.enable()


def _next_s(replica: Replica) -> float:
    return replica.next_s


def _check_capacity(limits: SchedulerLimits) -> None:
    if limits.num_kv_pages * limits.page_size < limits.max_model_len:
        raise ConfigError(
            f"max_model_len ({limits.max_model_len}) is more than the KV cache holds: {limits.num_kv_pages} pages of "
            f"{limits.page_size} tokens",
            param="max_model_len",
        )
