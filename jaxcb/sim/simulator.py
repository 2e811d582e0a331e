"""The real Scheduler under a virtual clock. The device is a step-time model, and its tokens are dummies."""

from __future__ import annotations

import functools
from array import array
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Array

import numpy as np

from jaxcb.errors import ConfigError, RequestError
from jaxcb.request import Request, SamplingParams
from jaxcb.scheduler import Scheduler, SchedulerLimits, Sequence, StepPlan, TokenEvent
from jaxcb.sim.result import RequestRecord, Result
from jaxcb.sim.step_time import StepTime, load_of
from jaxcb.sim.trace import TraceRequest

DUMMY_TOKEN = 0


def simulate(
    limits: SchedulerLimits, trace: Array[TraceRequest], step_time: StepTime, *, run_ahead: bool = True
) -> Result:
    """Run a trace to its end. Arguments as for :class:`Simulation`."""
    simulation = Simulation(limits, trace, step_time, run_ahead=run_ahead)
    while simulation.step():
        pass
    return simulation.result()


class Simulation:
    """A run that is stepped, so that a caller can watch it or stop in the middle.

    Arguments:
        limits: what the scheduler may use.
        trace: requests in the order of their arrivals. Each gets exactly the output length it asks for; one that the
            scheduler refuses is marked so and left out.
        step_time: how long a step takes.
        run_ahead: plan step k + 1 while step k runs, as the engine does by default.
        on_plan: called with each plan and the time at which its step starts on the device.

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
        on_plan: Callable[[StepPlan, float], None] | None = None,
    ):
        _check(limits, trace)
        self.scheduler = Scheduler(limits)
        self.records = [RequestRecord(*request) for request in trace]
        self.num_done = 0
        """Requests that have finished or were refused."""
        self.now_s = trace[0].arrival_s if trace else 0.0
        self._started_s = self.now_s
        self._step_time = step_time
        self._on_plan = on_plan
        self._depth = 1 if run_ahead else 0
        self._next_arrival = 0
        self._record_of: dict[Sequence, RequestRecord] = {}
        self._in_flight: deque[tuple[StepPlan, float]] = deque()  # with the time at which the step ends
        self._device_free_s = self.now_s
        self._gaps_s, self._gap_counts = array("d"), array("q")
        self._busy_s = self._page_seconds = 0.0
        self._num_steps = self._num_step_tokens = self._num_rows = self._peak_pages = 0

    def step(self) -> bool:
        """Launch the next step if one can be planned, and commit the oldest once enough are in flight.

        With nothing to do the clock jumps to the next arrival. Returns False when the trace is done.
        """
        self._take_arrivals()
        plan = self.scheduler.plan()
        if plan is not None:
            self._launch(plan)
        elif not self._in_flight:
            if self.scheduler.has_requests:
                raise RuntimeError("the scheduler holds requests and plans nothing: this is a bug")
            if self._next_arrival == len(self.records):
                return False
            self.now_s = self.records[self._next_arrival].arrival_s
        if self._in_flight and (plan is None or len(self._in_flight) > self._depth):
            self._commit(*self._in_flight.popleft())
        return True

    def result(self) -> Result:
        """What was done so far."""
        counters, num_pages = self.scheduler.counters, self.scheduler.pool.num_pages
        return Result(
            requests=self.records,
            duration_s=self.now_s - self._started_s,
            busy_s=self._busy_s,
            num_steps=self._num_steps,
            num_step_tokens=self._num_step_tokens,
            num_output_tokens=counters.generated_tokens,
            num_preemptions=counters.preemptions,
            num_prompt_tokens=counters.prompt_tokens,
            num_cached_tokens=counters.prompt_tokens_cached,
            mean_running=self._num_rows / self._num_steps if self._num_steps else 0.0,
            mean_kv_use=self._page_seconds / (self._busy_s * num_pages) if self._busy_s else 0.0,
            peak_kv_use=self._peak_pages / num_pages,
            gaps_s=np.array(self._gaps_s),
            gap_counts=np.array(self._gap_counts),
        )

    def _take_arrivals(self) -> None:
        while self._next_arrival < len(self.records):
            record = self.records[self._next_arrival]
            if record.arrival_s > self.now_s:
                return
            self._add(self._next_arrival, record)
            self._next_arrival += 1

    def _add(self, number: int, record: RequestRecord) -> None:
        # Prefixes are equal only from the first token on, so a first token of its own keeps a prompt from being shared.
        prompt = [number, *[DUMMY_TOKEN] * (record.num_prompt_tokens - 1)]
        sampling = _exactly(record.num_output_tokens)
        try:
            sequence = self.scheduler.add(
                Request(request_id=str(number), prompt_token_ids=prompt, sampling=sampling, arrival_s=record.arrival_s)
            )
        except RequestError:
            record.refused = True
            self.num_done += 1
        else:
            self._record_of[sequence] = record

    def _launch(self, plan: StepPlan) -> None:
        start_s = max(self.now_s, self._device_free_s)
        step_s = self._step_time.step_s(load_of(plan))
        self._device_free_s = start_s + step_s
        self._in_flight.append((plan, self._device_free_s))
        pages = self.scheduler.num_live_pages
        self._num_steps += 1
        self._num_step_tokens += plan.num_tokens
        self._num_rows += len(plan.rows)
        self._busy_s += step_s
        self._page_seconds += pages * step_s
        self._peak_pages = max(self._peak_pages, pages)
        if self._on_plan is not None:
            self._on_plan(plan, start_s)

    def _commit(self, plan: StepPlan, end_s: float) -> None:
        """Give each row a dummy token at ``end_s``. Most gaps of a step are equal, so they are stored as one number."""
        events = self.scheduler.commit(plan, [DUMMY_TOKEN] * len(plan.rows))
        last_s, self.now_s = self.now_s, end_s
        num_steady, record_of = 0, self._record_of
        for event in events:
            record = record_of[event.sequence]
            before_s, record.last_token_s = record.last_token_s, end_s
            if before_s == last_s:
                num_steady += 1
            elif before_s is None:
                record.first_token_s = end_s
            else:
                self._add_gaps(end_s - before_s, 1)
            if event.finish_reason is not None:
                self._finish(event, record)
        if num_steady:
            self._add_gaps(end_s - last_s, num_steady)

    def _add_gaps(self, gap_s: float, count: int) -> None:
        self._gaps_s.append(gap_s)
        self._gap_counts.append(count)

    def _finish(self, event: TokenEvent, record: RequestRecord) -> None:
        sequence = event.sequence
        del self._record_of[sequence]
        record.finished_s = self.now_s
        record.num_generated = sequence.num_generated
        record.num_preemptions = sequence.num_preemptions
        record.num_cached_tokens = sequence.num_cached_tokens
        self.num_done += 1


@functools.cache
def _exactly(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def _check(limits: SchedulerLimits, trace: Array[TraceRequest]) -> None:
    capacity = limits.num_kv_pages * limits.page_size
    if capacity < limits.max_model_len:
        raise ConfigError(
            f"max_model_len ({limits.max_model_len}) is more than the KV cache holds: {limits.num_kv_pages} pages of "
            f"{limits.page_size} tokens",
            param="max_model_len",
        )
    for number in range(1, len(trace)):
        if trace[number].arrival_s < trace[number - 1].arrival_s:
            raise ConfigError(
                f"a trace must be in the order of arrivals: request {number} arrives at {trace[number].arrival_s} s, "
                f"the one before it at {trace[number - 1].arrival_s} s",
                param="trace",
            )
