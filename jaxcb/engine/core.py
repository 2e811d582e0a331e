"""EngineCore: scheduler and runner as one object that is stepped. No threads, no text: the loop and tests drive it."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Sequence as Seq

import numpy as np
from jaxtyping import Shaped

from jaxcb.engine.constraints import Constraints
from jaxcb.engine.incoming import Incoming
from jaxcb.engine.outgoing import Outgoing
from jaxcb.engine.pooling import Pool
from jaxcb.engine.step_log import StepLog
from jaxcb.engine.trace import EngineTrace
from jaxcb.errors import RequestError
from jaxcb.grammar import Grammar
from jaxcb.logprobs import Logprobs
from jaxcb.request import FinishReason, Request
from jaxcb.sampling.sampler import NOTHING
from jaxcb.scheduler import Scheduler, TokenEvent
from jaxcb.scheduler.sequence import Sequence, Status
from jaxcb.step.runner import InFlight, Runner


@dataclasses.dataclass(frozen=True)
class PrefixPages:
    """The KV of a beginning, on its way from one engine to another."""

    token_ids: list[int]
    """As many full pages as there are."""
    pages: Shaped[np.ndarray, "n L 2 page_size K D"]
    order: str = "rows"
    """Of the numbers in a page: :data:`pallas_kernels.native.Order`. The native kernels have two: whoever keeps pages
    keeps this with them."""


class EngineCore:
    """One step at a time, running at most one step ahead of what the host knows.

    With ``run_ahead`` the device works on step k + 1 while the host waits for, and commits, step k:

        host    plan 1  launch 1  plan 2  launch 2  wait 1  commit 1  plan 3  launch 3  wait 2 ...
        device                    [---- step 1 ----][---- step 2 ----][---- step 3 ---- ...
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        run_ahead: bool,
        step_log: StepLog | None = None,
        trace: EngineTrace | None = None,
    ):
        self.scheduler = scheduler
        self.runner = runner
        self.step_log, self.trace = step_log, trace
        self.num_steps = 0
        self.constraints = Constraints(scheduler)
        self.incoming = Incoming(scheduler, runner, self.constraints)
        self.outgoing: list[Outgoing] = []
        """To each engine that takes KV from here."""
        self._blocked = False
        self._depth = 1 if run_ahead else 0
        self._in_flight: deque[InFlight] = deque()
        self._last_wait_s = 0.0
        self._prompt_logprobs: dict[Sequence, dict[int, Logprobs]] = {}
        self._pools: dict[Sequence, Pool] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or (self.scheduler.has_requests and not self._blocked)

    def something_came(self) -> None:
        """Requests that found no room, because pages are held for other engines, may find some now."""
        self._blocked = False

    def add(self, request: Request) -> None:
        """See :meth:`Scheduler.add`."""
        self.scheduler.add(request)

    def fork(self, request: Request, parent_id: str | None) -> None:
        """Add a request that shares the pages of a sequence, if that is still here: see :meth:`Scheduler.add`."""
        try:
            self.scheduler.add(request, parent_id=parent_id)
        except RequestError as error:
            if error.param != "parent_id":
                raise
            self.scheduler.add(request)

    def add_choices(self, requests: list[Request], grammar: Grammar | None = None) -> None:
        """Several answers to one prompt, held to a grammar if one is given: see :meth:`Scheduler.add_choices`."""
        sequences = self.scheduler.add_choices(requests)
        if grammar is not None:
            for sequence in sequences:
                self.constraints.open(sequence, grammar)

    def finish(self, request_id: str, reason: FinishReason) -> TokenEvent | None:
        """End a request from outside; None if it has ended already."""
        self.incoming.forget(request_id)
        sequence = self.scheduler.finish(request_id, reason)
        if sequence is None:
            return None
        self.constraints.drop(sequence)
        return TokenEvent(sequence, None, reason)

    def restart_all(self) -> None:
        """The KV of all requests counts no more, here and on its way: see :meth:`Scheduler.restart_all`. Nothing is in
        flight."""
        self.give_up_handovers()
        self.scheduler.restart_all()

    def give_up_handovers(self) -> None:
        """What is on its way to other engines, or from them, counts no more."""
        self.incoming.give_up_all()
        for outgoing in self.outgoing:
            outgoing.lose_all()

    def export_prefix(self, token_ids: Seq[int], cache_salt: str) -> PrefixPages:
        """The KV of the longest beginning of ``token_ids`` that is cached on the device."""
        pages = self.scheduler.prefixes.find(token_ids, cache_salt)
        known = len(pages) * self.scheduler.limits.page_size
        return PrefixPages(list(token_ids[:known]), self.runner.read_pages(pages), self.runner.page_order)

    def import_prefix(self, prefix: PrefixPages, cache_salt: str) -> int:
        """Cache the KV of a beginning as if it had been computed here; returns the tokens that found a place."""
        placed = self.scheduler.prefixes.place(prefix.token_ids, cache_salt)
        # Pages that made room may be on their way to host memory: they go first.
        self.runner.move_pages(self.scheduler.take_moves())
        indices, pages = [index for index, _ in placed], [page for _, page in placed]
        self.runner.write_pages(pages, prefix.pages[indices])
        return len(placed) * self.scheduler.limits.page_size

    def drain(self) -> list[TokenEvent]:
        """Commit what is in flight, and launch nothing."""
        events: list[TokenEvent] = []
        while self._in_flight:
            events += self._commit()
        return events

    def step(self) -> list[TokenEvent]:
        """Launch the next step if one can be planned, and commit the oldest once enough are in flight."""
        started_s = time.perf_counter()
        self.incoming.make_room()
        plan = self.scheduler.plan()
        events: list[TokenEvent] = []
        if plan is not None:
            planned_s = time.perf_counter()
            if constrained := self.constraints.in_step(plan):
                forwarded = self.runner.forward(plan)
                events += self.drain()
                masks = self.constraints.masks(constrained, self.runner.spec.vocab_size)
                self._in_flight.append(self.runner.sample(forwarded, masks))
            else:
                self._in_flight.append(self.runner.launch(plan))
            for outgoing in self.outgoing:
                outgoing.launched(plan)
            self.num_steps += 1
            if self.step_log is not None:
                self.step_log.launched(plan.step, started_s)
            if self.trace is not None:
                self.trace.span("plan", f"plan {plan.step}", started_s, planned_s, sequences=plan.num_rows)
                self.trace.span("launch", f"launch {plan.step}", planned_s, time.perf_counter())
        elif not self._in_flight and self.scheduler.has_requests:
            self._blocked = self.scheduler.handover.waits_for_others
            if not self._blocked:
                raise RuntimeError("the scheduler holds requests and plans nothing: this is a bug")
        if self._in_flight and (plan is None or len(self._in_flight) > self._depth):
            events += self._commit()
            self.incoming.make_room()  # with what the step gave back: it may have been the last for now
        return events

    def _commit(self) -> list[TokenEvent]:
        """Wait for the oldest step in flight; what came of it."""
        oldest = self._in_flight.popleft()
        token_ids, ended_s = oldest.wait(), time.perf_counter()
        begun_s = self._observe(oldest, ended_s)
        self._collect_prompt_logprobs(oldest)
        failed = self._end_without_token(oldest, token_ids) if min(token_ids) == NOTHING else []
        events = list(self.scheduler.commit(oldest.plan, token_ids))
        self._add_logprobs(oldest, events)
        if oldest.sampled.pooled or self._pools:
            self._add_embeddings(oldest, events)
        events += failed + self.constraints.learn(events)
        if self.step_log is not None:
            self.step_log.done(oldest, ended_s, more=self.has_work)
        if self.trace is not None:
            step, tokens = oldest.plan.step, oldest.plan.num_tokens
            self.trace.span("device", f"{oldest.bucket}", begun_s, ended_s, step=step, tokens=tokens)
            self.trace.span("commit", f"commit {step}", ended_s, time.perf_counter(), tokens=len(events))
        return events

    def _end_without_token(self, step: InFlight, token_ids: list[int]) -> list[TokenEvent]:
        """End what could sample nothing; its row then commits late, as any of a sequence that has ended."""
        return [
            self.constraints.nothing_left(row.sequence)
            for row, token in zip(step.plan.rows, token_ids, strict=True)
            if token == NOTHING and row.samples and row.sequence.status is not Status.FINISHED
        ]

    def _collect_prompt_logprobs(self, step: InFlight) -> None:
        """By position: after a preemption the same ones come again."""
        for piece in step.sampled.prompt:
            pieces = self._prompt_logprobs.setdefault(piece.sequence, {})
            pieces[piece.first] = piece.wait()

    def _add_logprobs(self, step: InFlight, events: list[TokenEvent]) -> None:
        """Put them beside the tokens that they belong to; those of a prompt beside the first one."""
        if step.sampled.logprobs:
            index = {row.sequence: i for i, row in enumerate(step.plan.rows)}
            for i, event in enumerate(events):
                if event.token_id is not None:
                    sampling = event.sequence.request.sampling
                    logprobs = step.sampled.logprobs_of(index[event.sequence], sampling, event.token_id)
                    events[i] = event._replace(logprobs=logprobs)
        if self._prompt_logprobs:
            for i, event in enumerate(events):
                if (pieces := self._prompt_logprobs.pop(event.sequence, None)) is not None:
                    events[i] = event._replace(prompt_logprobs=_in_order(pieces))
            self._prompt_logprobs = {
                sequence: pieces
                for sequence, pieces in self._prompt_logprobs.items()
                if sequence.status is not Status.FINISHED
            }

    def _add_embeddings(self, step: InFlight, events: list[TokenEvent]) -> None:
        """Put those of prompts that are complete beside the first token."""
        for piece in step.sampled.pooled:
            pool = self._pools.setdefault(piece.sequence, Pool())
            pool.add(piece)
        for i, event in enumerate(events):
            if event.sequence in self._pools:
                pool = self._pools.pop(event.sequence)
                events[i] = event._replace(embedding=pool.embedding(event.sequence))
        self._pools = {
            sequence: pool for sequence, pool in self._pools.items() if sequence.status is not Status.FINISHED
        }

    def _observe(self, step: InFlight, ended_s: float) -> float:
        """When the device took the step up: when it was launched, or done with the one before."""
        begun_s = max(step.launched_s, self._last_wait_s)
        self.scheduler.observe(step.plan, ended_s - begun_s)
        self._last_wait_s = ended_s
        return begun_s


def _in_order(pieces: dict[int, Logprobs]) -> Logprobs:
    """Pieces by their first position, which may overlap: a preempted prompt was cut elsewhere the second time."""
    parts, end = [], 0
    for first in sorted(pieces):
        piece = pieces[first]
        if first + len(piece) > end:
            parts.append(piece.take(slice(max(end - first, 0), None)))
            end = first + len(piece)
    return Logprobs.concatenate(parts)
