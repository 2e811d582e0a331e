"""A device made of dicts: it keeps token ids where the real one keeps KV, and "samples" a hash of what it reads.

So whatever a row attends to is checked for real: a wrong page, a stale block table, a page shared too early or a late
token changes the answer.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence as Array

from jaxcb.paging import PageMoves
from jaxcb.request import Request, SamplingParams
from jaxcb.scheduler import PlanRow, Scheduler, SchedulerLimits, StepPlan, TokenEvent
from jaxcb.scheduler.plan import IN_FLIGHT
from jaxcb.scheduler.scheduler import Drafter

VOCABULARY = 50
EOS = 0


def next_token(context: Array[int]) -> int:
    """The model: every token of the context counts, and so does its place."""
    state = 17
    for token in context:
        state = (state * 31 + token + 1) % 1_000_003
    return state % VOCABULARY


def answer_alone(
    prompt: Array[int], sampling: SamplingParams, max_model_len: int, window: int | None = None
) -> list[int]:
    """What the request gets from a machine of its own: the oracle."""
    tokens = list(prompt)
    limit = max_model_len if sampling.max_tokens is None else len(prompt) + sampling.max_tokens
    while len(tokens) < limit:
        tokens.append(next_token(tokens[-window:] if window else tokens))
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {EOS})
        if tokens[-1] in ends and len(tokens) - len(prompt) > sampling.min_tokens:
            break
    return tokens[len(prompt) :]


@dataclasses.dataclass
class FakeDevice:
    page_size: int
    window: int | None = None
    pages: dict[int, dict[int, int]] = dataclasses.field(default_factory=dict)
    """Page -> offset -> token."""
    host: dict[int, dict[int, int]] = dataclasses.field(default_factory=dict)
    tables: dict[int, dict[int, int]] = dataclasses.field(default_factory=dict)
    last_token: dict[int, int] = dataclasses.field(default_factory=dict)

    def run(self, plan: StepPlan) -> list[int | list[int]]:
        """Pages move; then all rows write, then all read, as in a real step."""
        if plan.moves is not None:
            self._move(plan.moves)
        for row in plan.rows:
            table = self.tables.setdefault(row.slot, {})
            table.update({row.first_new_page + i: page for i, page in enumerate(row.new_pages)})
            tokens = [self.last_token[row.slot] if token == IN_FLIGHT else token for token in row.token_ids]
            for position, token in enumerate(tokens, row.start):
                self.pages.setdefault(table[position // self.page_size], {})[position % self.page_size] = token
        sampled: list[int | list[int]] = []
        for row in plan.rows:
            tokens = [self._sample(row, row.context_len - row.num_drafts)]
            for i in range(row.num_drafts):
                if row.token_ids[len(row.token_ids) - row.num_drafts + i] != tokens[-1]:
                    break
                tokens.append(self._sample(row, row.context_len - row.num_drafts + i + 1))
            sampled.append(tokens if row.num_drafts else tokens[0])
            if row.samples:
                self.last_token[row.slot] = tokens[-1]
        return sampled

    def _sample(self, row: PlanRow, length: int) -> int:
        """Attend to the last ``window`` of ``length`` positions: what must not be read any more may hold anything."""
        table = self.tables[row.slot]
        first = 0 if self.window is None else max(length - self.window, 0)
        return next_token([self.pages[table[i // self.page_size]][i % self.page_size] for i in range(first, length)])

    def _move(self, moves: PageMoves) -> None:
        for pairs in (moves.out, moves.into, moves.copies):
            assert len({written for _, written in pairs}) == len(pairs), "a page is written twice in one batch"
        leaving = {host: dict(self.pages[page]) for page, host in moves.out}
        self.host |= leaving
        self.pages |= {page: dict(self.host[host]) for host, page in moves.into}
        self.pages |= {copy: dict(self.pages[page]) for page, copy in moves.copies}


class Driver:
    """The engine's loop over a fake device. ``depth`` steps may be in flight when the next is planned."""

    def __init__(self, scheduler: Scheduler, depth: int):
        self.scheduler, self.depth = scheduler, depth
        self.device = FakeDevice(scheduler.limits.page_size, scheduler.limits.sliding_window)
        self.in_flight: deque[tuple[StepPlan, list[int | list[int]]]] = deque()
        self.answers: dict[str, list[int]] = {}
        self.finished: dict[str, TokenEvent] = {}
        self.plans: list[StepPlan] = []

    def add(
        self,
        request_id: str,
        prompt: Array[int],
        sampling: SamplingParams,
        *,
        parent_id: str | None = None,
        **fields: object,
    ) -> None:
        request = Request(request_id=request_id, prompt_token_ids=prompt, sampling=sampling, **fields)
        self.scheduler.add(request, parent_id=parent_id)
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
        assert all(len(row.token_ids) == 1 + row.num_drafts for row in plan.rows[: plan.num_decodes])
        assert not any(row.num_drafts for row in plan.rows[plan.num_decodes :])
        assert plan.num_drafts == sum(row.num_drafts for row in plan.rows)


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


def driver(depth: int = 1, *, drafter: Drafter | None = None, num_draft_tokens: int = 3, **changes: object) -> Driver:
    scheduler = Scheduler(limits(**changes), eos_token_ids=(EOS,), drafter=drafter, num_draft_tokens=num_draft_tokens)
    return Driver(scheduler, depth)
