"""A device made of dicts: it keeps token ids where the real one keeps KV, and "samples" a hash of what it reads.

So whatever a row attends to is checked for real: a wrong page, a stale block table, a page shared too early or a late
token changes the answer.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence as Array

from jaxcb.request import Request, SamplingParams
from jaxcb.scheduler import Scheduler, SchedulerLimits, StepPlan, TokenEvent
from jaxcb.scheduler.plan import IN_FLIGHT

VOCABULARY = 50
EOS = 0


def next_token(context: Array[int]) -> int:
    """The model: every token of the context counts, and so does its place."""
    state = 17
    for token in context:
        state = (state * 31 + token + 1) % 1_000_003
    return state % VOCABULARY


def answer_alone(prompt: Array[int], sampling: SamplingParams, max_model_len: int) -> list[int]:
    """What the request gets from a machine of its own: the oracle."""
    tokens = list(prompt)
    limit = max_model_len if sampling.max_tokens is None else len(prompt) + sampling.max_tokens
    while len(tokens) < limit:
        tokens.append(next_token(tokens))
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {EOS})
        if tokens[-1] in ends and len(tokens) - len(prompt) > sampling.min_tokens:
            break
    return tokens[len(prompt) :]


@dataclasses.dataclass
class FakeDevice:
    page_size: int
    content: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    tables: dict[int, dict[int, int]] = dataclasses.field(default_factory=dict)
    last_token: dict[int, int] = dataclasses.field(default_factory=dict)

    def run(self, plan: StepPlan) -> list[int]:
        """All rows write first, then all read, as in a real step."""
        fed = []
        for row in plan.rows:
            table = self.tables.setdefault(row.slot, {})
            table.update({row.first_new_page + i: page for i, page in enumerate(row.new_pages)})
            tokens = [self.last_token[row.slot] if token == IN_FLIGHT else token for token in row.token_ids]
            fed.append(tokens)
            for position, token in enumerate(tokens, row.start):
                self.content[table[position // self.page_size], position % self.page_size] = token
        sampled = []
        for row in plan.rows:
            table = self.tables[row.slot]
            context = [
                self.content[table[position // self.page_size], position % self.page_size]
                for position in range(row.context_len)
            ]
            sampled.append(next_token(context))
            if row.samples:
                self.last_token[row.slot] = sampled[-1]
        return sampled


class Driver:
    """The engine's loop over a fake device. ``depth`` steps may be in flight when the next is planned."""

    def __init__(self, scheduler: Scheduler, depth: int):
        self.scheduler, self.depth = scheduler, depth
        self.device = FakeDevice(scheduler.limits.page_size)
        self.in_flight: deque[tuple[StepPlan, list[int]]] = deque()
        self.answers: dict[str, list[int]] = {}
        self.finished: dict[str, TokenEvent] = {}
        self.plans: list[StepPlan] = []

    def add(self, request_id: str, prompt: Array[int], sampling: SamplingParams) -> None:
        self.scheduler.add(Request(request_id=request_id, prompt_token_ids=prompt, sampling=sampling))
        self.answers[request_id] = []

    def step(self) -> StepPlan | None:
        """Plan and launch; commit the oldest if enough are in flight or nothing could be planned."""
        plan = self.scheduler.plan()
        self.scheduler.check()
        if plan is None:
            assert self.in_flight or not self.scheduler.has_requests, "requests wait and nothing can be planned"
        else:
            self._check_plan(plan)
            self.plans.append(plan)
            self.in_flight.append((plan, self.device.run(plan)))
        if self.in_flight and (plan is None or len(self.in_flight) > self.depth):
            self.commit()
        return plan

    def commit(self) -> None:
        for event in self.scheduler.commit(*self.in_flight.popleft()):
            request_id = event.sequence.request.request_id
            if event.token_id is not None:
                self.answers[request_id].append(event.token_id)
            if event.finish_reason is not None:
                self.finished[request_id] = event
        self.scheduler.check()

    def run(self, max_steps: int = 100_000) -> None:
        """Until nothing is left; more steps than ``max_steps`` is a deadlock."""
        for _ in range(max_steps):
            if not self.in_flight and not self.scheduler.has_requests:
                return
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")

    def _check_plan(self, plan: StepPlan) -> None:
        limits = self.scheduler.limits
        assert plan.num_tokens == sum(len(row.token_ids) for row in plan.rows) <= limits.max_num_batched_tokens
        assert 0 < len(plan.rows) <= limits.max_num_seqs
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "two rows in one slot"
        assert all(len(row.token_ids) == 1 for row in plan.rows[: plan.num_decodes])


def limits(**changes: object) -> SchedulerLimits:
    values = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
        "num_kv_pages": 64,
        "page_size": 4,
    } | changes
    values.setdefault("num_slots", 2 * values["max_num_seqs"])
    return SchedulerLimits(**values)


def driver(depth: int = 1, **changes: object) -> Driver:
    return Driver(Scheduler(limits(**changes), eos_token_ids=(EOS,)), depth)
