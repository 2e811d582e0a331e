"""A device made of dicts: it keeps for each position its token and a state, which comes of the state before it, where
the real one keeps KV; and "samples" a hash of what it reads.

So whatever a row attends to is checked for real: a wrong page, a stale block table, a page shared too early or under
another beginning, or a late token changes the answer.
"""

from __future__ import annotations

import dataclasses
import random
import zlib
from collections import deque
from collections.abc import Sequence as Seq
from typing import TextIO

from jaxcb.paging import PageMoves
from jaxcb.request import Request, SamplingParams
from jaxcb.scheduler import Row, Scheduler, SchedulerLimits, Sequence, Status, StepPlan, TokenEvent
from jaxcb.scheduler.plan import IN_FLIGHT
from jaxcb.scheduler.replay import RecordingScheduler
from jaxcb.scheduler.rows import Drafter

VOCABULARY = 50
EOS = 0
PRIME = 1_000_003


Cell = tuple[int, int]
"""A token, and the state after it."""


def next_cell(before: Cell | None, token: int, salt: str) -> Cell:
    state = zlib.crc32(salt.encode()) % PRIME if before is None else before[1]
    return token, (state * 31 + token + 1) % PRIME


def next_token(cells: Seq[Cell]) -> int:
    """The model: every cell that it attends to counts, and so does its place."""
    digest = 17
    for token, state in cells:
        digest = (digest * 37 + state * 3 + token) % PRIME
    return digest % VOCABULARY


def answer_alone(
    prompt: Seq[int], sampling: SamplingParams, max_model_len: int, window: int | None = None, salt: str = ""
) -> list[int]:
    """What the request gets from a machine of its own: the oracle."""
    cells: list[Cell] = []
    for token in prompt:
        cells.append(next_cell(cells[-1] if cells else None, token, salt))
    limit = max_model_len if sampling.max_tokens is None else len(prompt) + sampling.max_tokens
    while len(cells) < limit:
        token = next_token(cells[-window:] if window else cells)
        cells.append(next_cell(cells[-1], token, salt))
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {EOS})
        if token in ends and len(cells) - len(prompt) > sampling.min_tokens:
            break
    return [token for token, _ in cells[len(prompt) :]]


@dataclasses.dataclass
class FakeDevice:
    page_size: int
    window: int | None = None
    pages: dict[int, dict[int, Cell]] = dataclasses.field(default_factory=dict)
    """Page -> offset -> cell."""
    host: dict[int, dict[int, Cell]] = dataclasses.field(default_factory=dict)
    tables: dict[int, dict[int, int]] = dataclasses.field(default_factory=dict)
    last_token: dict[int, int] = dataclasses.field(default_factory=dict)

    def run(self, plan: StepPlan) -> list[int | list[int]]:
        """Pages move; then all rows write, then all read, as in a real step."""
        if plan.moves is not None:
            self._move(plan.moves)
        for row in plan.rows:
            table = self.tables.setdefault(row.slot, {})
            table.update({row.first_new_page + i: page for i, page in enumerate(row.new_pages)})
            salt = row.sequence.request.cache_salt
            cell = self._cell(row.slot, row.start - 1) if row.start else None
            for position, token in enumerate(row.token_ids, row.start):
                cell = next_cell(cell, self.last_token[row.slot] if token == IN_FLIGHT else token, salt)
                self.pages.setdefault(table[position // self.page_size], {})[position % self.page_size] = cell
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

    def uses(self, row: Row) -> tuple[set[int], set[int]]:
        """Pages that a row reads, its own included, and pages that it writes."""
        first = 0 if self.window is None else max(row.start - self.window + 1, 0)
        pages = [self.tables[row.slot][i] for i in range(-(-row.context_len // self.page_size))]
        return set(pages[first // self.page_size :]), set(pages[row.start // self.page_size :])

    def _cell(self, slot: int, position: int) -> Cell:
        return self.pages[self.tables[slot][position // self.page_size]][position % self.page_size]

    def _sample(self, row: Row, length: int) -> int:
        """Attend to the last ``window`` of ``length`` positions: what must not be read any more may hold anything."""
        first = 0 if self.window is None else max(length - self.window, 0)
        return next_token([self._cell(row.slot, position) for position in range(first, length)])

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
        self.foresight: dict[str, list[int]] = {}
        """Whole answers of requests some of whose tokens are foreseen, as a grammar would."""
        self.chance_to_foresee = 0.4
        """After a token that wasn't."""
        self._rng = random.Random(depth)
        self._seen: set[Sequence] = set()  # in some plan so far
        self._foreseen_to: dict[Sequence, int] = {}
        self._in_use: dict[int, list[tuple[Sequence, set[int]]]] = {}  # step in flight -> pages that its rows read

    def add(
        self,
        request_id: str,
        prompt: Seq[int],
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
        ready = [s for s in self.scheduler.roster.running.values() if s.decoding and s.num_scheduled < s.pause_at]
        preempted = [s for s in self.scheduler.roster.waiting if s.num_preemptions]
        plan = self.scheduler.plan()
        self.scheduler.check()
        if plan is None:
            assert self.in_flight or not self.scheduler.has_requests, "requests wait and nothing can be planned"
        else:
            self._check_plan(plan)
            self._check_order(plan, ready, preempted)
            self.plans.append(plan)
            sampled = self.device.run(plan)
            self._check_pages_in_flight(plan)
            self.in_flight.append((plan, sampled))
        if self.in_flight and (plan is None or len(self.in_flight) > self.depth):
            self.commit()
        return plan

    def commit(self) -> None:
        plan, sampled = self.in_flight.popleft()
        self._in_use.pop(plan.step, None)
        events = list(self.scheduler.commit(plan, sampled))
        self._foresee({event.sequence for event in events})
        for event in events:
            request_id = event.sequence.request.request_id
            if event.token_id is not None:
                self.answers[request_id].append(event.token_id)
            if event.finish_reason is not None:
                self.finished[request_id] = event
        self.scheduler.check()

    def foresee(self, request_id: str, answer: list[int], end: int) -> None:
        """The first ``end`` tokens of the answer are known from now on."""
        sequence = self.scheduler.roster.find(request_id)
        assert sequence is not None
        self.foresight[request_id] = answer
        self._foreseen_to[sequence] = end
        self.scheduler.foresee(sequence, answer[sequence.num_generated : end])

    def _foresee(self, sequences: set[Sequence]) -> None:
        """Now and then learn some tokens that come next. What was foreseen is told again without what has come."""
        for sequence in sorted(sequences, key=lambda sequence: sequence.ticket):
            answer = self.foresight.get(sequence.request.request_id)
            if answer is None or sequence.status is Status.FINISHED:
                continue
            end = self._foreseen_to.get(sequence, 0)
            if end <= sequence.num_generated and self._rng.random() < self.chance_to_foresee:
                most = answer[: sequence.num_generated + self._rng.randint(1, 9)]
                end = next((i for i, token in enumerate(most) if token in sequence.end_ids), len(most))
                self._foreseen_to[sequence] = end
            self.scheduler.foresee(sequence, answer[sequence.num_generated : end])

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
        more = [len(row.token_ids) - 1 - row.num_drafts for row in plan.rows[: plan.num_decodes]]
        assert min(more, default=0) >= 0 and plan.num_foreseen == sum(more)
        assert not any(row.num_drafts for row in plan.rows[plan.num_decodes :])
        assert plan.num_drafts == sum(row.num_drafts for row in plan.rows)

    def _check_order(self, plan: StepPlan, ready: list[Sequence], preempted: list[Sequence]) -> None:
        """Decodes first; and nobody new before those that were preempted."""
        limits = self.scheduler.limits
        planned = {row.sequence for row in plan.rows}
        if not limits.prefill_first and self.scheduler._drafter is None:
            late = [s for s in ready if s.decoding and s not in planned]
            assert not late or plan.num_decodes == limits.max_num_batched_tokens, "a decode waits"
        if limits.policy != "priority" and not limits.max_passes:
            admitted = [s for s in planned - self._seen if not s.num_preemptions]
            still = [s for s in preempted if s.status is Status.WAITING]
            assert not (admitted and still), "a newcomer was admitted before one that was preempted"
        self._seen |= planned

    def _check_pages_in_flight(self, plan: StepPlan) -> None:
        """Nothing is written to a page that a step in flight reads for another sequence."""
        written: list[tuple[Sequence | None, set[int]]] = []
        reads = []
        for row in plan.rows:
            read, write = self.device.uses(row)
            reads.append((row.sequence, read))
            written.append((row.sequence, write))
        if plan.moves is not None:
            written.append((None, {page for _, page in plan.moves.into + plan.moves.copies}))
        for writer, pages in written:
            for entries in self._in_use.values():
                for reader, used in entries:
                    assert reader is writer or pages.isdisjoint(used), "a page in flight was given to someone else"
        self._in_use[plan.step] = reads


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


def recording_driver(file: TextIO, depth: int = 1, **changes: object) -> Driver:
    """One that writes down what happens."""
    return Driver(RecordingScheduler(limits(**changes), eos_token_ids=(EOS,), file=file), depth)
