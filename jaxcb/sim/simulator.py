"""A trace on one engine: the real Scheduler under a virtual clock."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable
from collections.abc import Sequence as Array

import numpy as np

from jaxcb.errors import ConfigError, RequestError
from jaxcb.request import Request, SamplingParams
from jaxcb.scheduler import Scheduler, SchedulerLimits, Sequence, StepPlan
from jaxcb.sim.replica import DUMMY_TOKEN, Gaps, Replica
from jaxcb.sim.result import RequestRecord, Result
from jaxcb.sim.step_time import StepTime
from jaxcb.sim.trace import TraceRequest


def simulate(
    limits: SchedulerLimits, trace: Array[TraceRequest], step_time: StepTime, *, run_ahead: bool = True
) -> Result:
    """Run a trace to its end. Arguments as for :class:`Simulation`."""
    simulation = Simulation(limits, trace, step_time, run_ahead=run_ahead)
    while simulation.step():
        pass
    return simulation.result()


class Arrivals:
    """The requests of a trace in the order in which they come, some only after others have ended.

    Raises:
        ConfigError: the trace isn't in order, or a request waits for a later one.
    """

    def __init__(self, trace: Array[TraceRequest]):
        _check_order(trace)
        self.trace = trace
        self._due = [(request.arrival_s, number) for number, request in enumerate(trace) if request.after is None]
        self._waiting_for: dict[int, list[int]] = {}
        for number, request in enumerate(trace):
            if request.after is not None:
                self._waiting_for.setdefault(request.after, []).append(number)

    @property
    def next_s(self) -> float:
        """When the next request comes; infinite if none is due."""
        return self._due[0][0] if self._due else float("inf")

    def pop(self) -> tuple[float, int]:
        """Time and number of the next request."""
        return heapq.heappop(self._due)

    def ended(self, number: int, now_s: float) -> None:
        """Let those come that waited for ``number`` to end."""
        for follower in self._waiting_for.pop(number, ()):
            heapq.heappush(self._due, (now_s + self.trace[follower].arrival_s, follower))


class Simulation:
    """A run that is stepped, so that a caller can watch it or stop in the middle.

    Arguments:
        limits: what the scheduler may use.
        trace: requests in the order of their arrivals. Each gets exactly the output length it asks for; one that the
            scheduler refuses is marked so and left out.
        step_time: how long a step takes.
        run_ahead: plan step k + 1 while step k runs, as the engine does by default.
        padded: tokens that the device computes for a plan, where they are more than those of the plan (buckets).
        on_plan: called with each plan, the time at which its step starts on the device, and how long it takes.

    Raises:
        ConfigError: the trace isn't in order, or a sequence of ``max_model_len`` tokens doesn't fit the KV pages.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        trace: Array[TraceRequest],
        step_time: StepTime,
        *,
        run_ahead: bool = True,
        padded: Callable[[StepPlan], int] | None = None,
        on_plan: Callable[[StepPlan, float, float], None] | None = None,
    ):
        check_capacity(limits)
        self.records = [RequestRecord.of(number, request) for number, request in enumerate(trace)]
        self.num_done = 0
        """Requests that have ended or were refused."""
        self._arrivals = Arrivals(trace)
        self._gaps = Gaps()
        self._replica = Replica(
            limits, step_time, self._gaps, self._ended, run_ahead=run_ahead, padded=padded, on_plan=on_plan
        )
        self._replica.now_s = self._started_s = self._arrivals.next_s if trace else 0.0

    @property
    def scheduler(self) -> Scheduler:
        return self._replica.scheduler

    @property
    def now_s(self) -> float:
        """The virtual clock."""
        return self._replica.now_s

    def step(self) -> bool:
        """One turn of the engine's loop. With nothing to do the clock jumps to the next arrival. Returns False when
        the trace is done."""
        replica, arrivals = self._replica, self._arrivals
        while arrivals.next_s <= replica.next_s:
            if arrivals.next_s == float("inf"):
                return False
            self._arrive(*arrivals.pop())
        replica.step()
        return True

    def result(self) -> Result:
        """What was done so far."""
        return Result.of(self.records, self._gaps, [self._replica], self._replica.now_s - self._started_s)

    def _arrive(self, arrival_s: float, number: int) -> None:
        request, record = self._arrivals.trace[number], self.records[number]
        record.arrival_s = arrival_s
        try:
            self._replica.add(request_of(number, request, arrival_s), record, arrival_s, answer_token(request))
        except RequestError:
            record.refused = True
            self._done(number, arrival_s)

    def _ended(self, sequence: Sequence, record: RequestRecord) -> None:
        record.finished_s = self._replica.now_s
        record.num_cached_tokens = sequence.num_cached_tokens
        self._done(record.number, self._replica.now_s)

    def _done(self, number: int, now_s: float) -> None:
        self.num_done += 1
        self._arrivals.ended(number, now_s)


def request_of(number: int, request: TraceRequest, arrival_s: float) -> Request:
    """A greedy request whose prompt shares what the trace says, and whose answer has exactly the length it says."""
    sampling = _exactly(request.num_output_tokens)
    return Request(
        request_id=str(number), prompt_token_ids=prompt_tokens(number, request), sampling=sampling, arrival_s=arrival_s
    )


def prompt_tokens(number: int, request: TraceRequest) -> list[int]:
    """Token ids: odd ones for runs of its content, an even one of its own for the rest. 0 is the dummy answer."""
    tokens: list[int] = []
    for run, length in request.content:
        tokens += [_run_token(run)] * length
    own = 2 * (number + 1)
    return tokens + [own] * (request.num_prompt_tokens - len(tokens))


def answer_token(request: TraceRequest) -> int:
    """The token that its answer consists of."""
    return DUMMY_TOKEN if request.answer is None else _run_token(request.answer)


def check_capacity(limits: SchedulerLimits) -> None:
    """
    Raises:
        ConfigError: the pages don't hold a sequence of ``max_model_len`` tokens.
    """
    if limits.num_kv_pages * limits.page_size < limits.max_model_len:
        raise ConfigError(
            f"max_model_len ({limits.max_model_len}) is more than the KV cache holds: {limits.num_kv_pages} pages of "
            f"{limits.page_size} tokens",
            param="max_model_len",
        )


def _run_token(run: int) -> int:
    return 2 * run + 1


@functools.cache
def _exactly(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def _check_order(trace: Array[TraceRequest]) -> None:
    last_s, last = -np.inf, 0
    for number, request in enumerate(trace):
        if request.after is not None:
            if not 0 <= request.after < number:
                raise ConfigError(
                    f"request {number} of the trace comes after request {request.after}, which must be an earlier one",
                    param="trace",
                )
            continue
        if request.arrival_s < last_s:
            raise ConfigError(
                f"a trace must be in the order of arrivals: request {number} arrives at {request.arrival_s} s, "
                f"request {last} before it at {last_s} s",
                param="trace",
            )
        last_s, last = request.arrival_s, number
