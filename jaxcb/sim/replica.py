"""One engine of a simulation: a real Scheduler whose device is a step-time model and whose tokens are dummies."""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections import deque
from collections.abc import Callable

from jaxcb.request import Request
from jaxcb.scheduler import Scheduler, SchedulerLimits, Sequence, StepPlan, load_of
from jaxcb.sim.arrivals import DUMMY_TOKEN
from jaxcb.sim.result import RequestRecord
from jaxcb.sim.step_time import StepTime

OnPlan = Callable[[StepPlan, float, float], None]
Padding = Callable[[StepPlan], int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaSpec:
    """What an engine is made of.

    Arguments:
        limits: what the scheduler may use.
        step_time: how long a step takes.
        run_ahead: plan step k + 1 while step k runs, as the engine does by default.
        padding: tokens that the device computes for a plan, where they are more than the plan's (compiled sizes, say).
        on_plan: called with each plan, the time at which its step starts on the device, and how long it takes.
        continues: its prompts come from other replicas with their KV, so they say nothing of prefix caching.
    """

    limits: SchedulerLimits
    step_time: StepTime
    run_ahead: bool = True
    padding: Padding | None = None
    on_plan: OnPlan | None = None
    continues: bool = False


class Gaps:
    """Times between the tokens of a request; most of a step's are equal, so they are stored with a count."""

    def __init__(self) -> None:
        self.seconds, self.counts = array("d"), array("q")

    def add(self, gap_s: float, count: int) -> None:
        """Note ``count`` equal gaps."""
        self.seconds.append(gap_s)
        self.counts.append(count)


class Usage:
    """What the steps of a replica came to."""

    def __init__(self) -> None:
        self.num_steps = self.num_step_tokens = self.num_rows = self.peak_pages = 0
        self.busy_s = self.page_seconds = 0.0
        self.held_token_seconds = self.live_token_seconds = 0.0
        """KV positions of the pages that are held, and those that hold something, over steps of every sequence."""


class Replica:
    """Stepped by a Simulation, which owns the requests.

    ``on_end`` is called when a sequence has ended, at ``now_s``; gaps between tokens go to ``gaps``.
    """

    def __init__(
        self,
        spec: ReplicaSpec,
        gaps: Gaps,
        now_s: float,
        on_end: Callable[[Replica, Sequence, RequestRecord], None],
    ):
        self.scheduler = Scheduler(spec.limits)
        self.now_s = now_s
        self.usage = Usage()
        self.num_open_tokens = 0
        """Prompt and answer tokens of the requests that are here."""
        self._spec, self._gaps, self._on_end = spec, gaps, on_end
        self._depth = 1 if spec.run_ahead else 0
        self._record_of: dict[Sequence, RequestRecord] = {}
        self._answer_of: dict[Sequence, int] = {}  # of those whose tokens matter to a later prompt
        self._in_flight: deque[tuple[StepPlan, float, float]] = deque()  # with the step's end and how long it takes
        self._device_free_s = now_s

    @property
    def step_time(self) -> StepTime:
        return self._spec.step_time

    @property
    def continues(self) -> bool:
        return self._spec.continues

    @property
    def num_open(self) -> int:
        """Requests that are here."""
        return len(self._record_of)

    @property
    def next_s(self) -> float:
        """The time of its next decision; infinite while it has nothing to do."""
        return self.now_s if self._in_flight or self.scheduler.has_requests else math.inf

    def add(self, request: Request, record: RequestRecord, now_s: float, answer_token: int = DUMMY_TOKEN) -> None:
        """Queue a request that comes at ``now_s``; each token of its answer will be ``answer_token``.

        Raises:
            RequestError: it can never run here. Nothing is kept of it.
        """
        idle = self.next_s == math.inf
        sequence = self.scheduler.add(request)
        if idle:
            self.now_s = max(self.now_s, now_s)
        self._record_of[sequence] = record
        self.num_open_tokens += _num_tokens(request)
        if answer_token != DUMMY_TOKEN:
            self._answer_of[sequence] = answer_token

    def step(self) -> None:
        """Launch the next step if one can be planned, and commit the oldest once enough are in flight."""
        plan = self.scheduler.plan()
        if plan is not None:
            self._launch(plan)
        elif not self._in_flight:
            raise RuntimeError("the scheduler holds requests and plans nothing: this is a bug")
        if plan is None or len(self._in_flight) > self._depth:
            self._commit(*self._in_flight.popleft())

    def _launch(self, plan: StepPlan) -> None:
        spec, usage = self._spec, self.usage
        start_s = max(self.now_s, self._device_free_s)
        load = load_of(plan)
        if spec.padding is None:
            step_s = spec.step_time.step_s(load)
        else:
            step_s = spec.step_time.step_s(load._replace(num_tokens=spec.padding(plan)))
        if plan.moves:
            step_s += (len(plan.moves.out) + len(plan.moves.into)) * spec.limits.host_page_s
        self._device_free_s = start_s + step_s
        self._in_flight.append((plan, self._device_free_s, step_s))
        pages = self.scheduler.num_live_pages
        usage.num_steps += 1
        usage.num_step_tokens += plan.num_tokens
        usage.num_rows += plan.num_rows
        usage.busy_s += step_s
        usage.page_seconds += pages * step_s
        if plan.num_rows == self.scheduler.num_running:
            usage.held_token_seconds += pages * spec.limits.page_size * step_s
            usage.live_token_seconds += load.kv_tokens * step_s
        usage.peak_pages = max(usage.peak_pages, pages)
        if spec.on_plan is not None:
            spec.on_plan(plan, start_s, step_s)

    def _commit(self, plan: StepPlan, end_s: float, step_s: float) -> None:
        """Give each row its token at ``end_s``. This runs for every token that is generated."""
        self.scheduler.observe(plan, step_s)
        tokens = self.scheduler.commit(plan, self._tokens(plan))
        last_s, self.now_s = self.now_s, end_s
        num_steady, record_of = 0, self._record_of
        for sequence in tokens.sequences:
            record = record_of[sequence]
            before_s, record.last_token_s = record.last_token_s, end_s
            if before_s == last_s:
                num_steady += 1
            elif before_s is None:
                record.first_token_s = end_s
            else:
                self._gaps.add(end_s - before_s, 1)
        if num_steady:
            self._gaps.add(end_s - last_s, num_steady)
        for event in tokens.endings.values():
            self._end(event.sequence, record_of[event.sequence])

    def _tokens(self, plan: StepPlan) -> list[int]:
        if not self._answer_of:
            return [DUMMY_TOKEN] * plan.num_rows
        answer_of = self._answer_of
        sequences = (*plan.decoding, *(row.sequence for row in plan.chunks))
        return [answer_of.get(sequence, DUMMY_TOKEN) for sequence in sequences]

    def _end(self, sequence: Sequence, record: RequestRecord) -> None:
        del self._record_of[sequence]
        self._answer_of.pop(sequence, None)
        self.num_open_tokens -= _num_tokens(sequence.request)
        record.num_preemptions += sequence.num_preemptions
        if record.num_generated == 0:  # else it comes from a prefill card, and what is "cached" is what came with it
            record.num_cached_tokens = sequence.num_cached_tokens
        record.num_generated += sequence.num_generated
        self._on_end(self, sequence, record)


def _num_tokens(request: Request) -> int:
    return len(request.prompt_token_ids) + (request.sampling.max_tokens or 0)
