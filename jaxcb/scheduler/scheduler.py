"""The Scheduler: iteration-level batching under a token budget, over paged KV.

``plan()`` decides a step, ``commit()`` learns its tokens. Between the two, further plans may be made (running
ahead); pages and slots that a planned step names stay owned until that step has committed.

The order within a plan, and where each idea comes from:

1. Every decoding sequence gets the KV position that it needs; while pages are short the newest sequence is preempted,
   its pages freed, its tokens recomputed later (vLLM, section 4.5 of the PagedAttention paper).
2. One token for each decode. Prompts never delay them (Sarathi-Serve's stall-free batching).
3. Chunks of prompts that were started.
4. New sequences, first come first served, while slots, budget and pages last (Orca's iteration-level scheduling).
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence as Array

from jaxcb.errors import RequestError
from jaxcb.paging import ROOT, PrefixCache
from jaxcb.request import MAX_FORBIDDEN_IDS, FinishReason, Request, SamplingParams
from jaxcb.scheduler.plan import IN_FLIGHT, PlanRow, StepPlan, TokenEvent
from jaxcb.scheduler.sequence import Sequence, Status


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """What the scheduler may use. ``num_slots`` exceeds ``max_num_seqs`` so that a new sequence need not wait for the
    slot of one whose last step is still in flight."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_kv_pages: int
    page_size: int
    num_slots: int
    enable_prefix_caching: bool = True
    admission_watermark: float = 0.01
    """Part of the pages that admissions leave free while others run, so that these can grow."""


@dataclasses.dataclass
class SchedulerCounters:
    """Totals since the start."""

    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    generated_tokens: int = 0
    preemptions: int = 0


RUNNING, FINISHED = Status.RUNNING, Status.FINISHED  # a global is found faster than a member of an enum
_NEXT = (IN_FLIGHT,)  # tuples of integers cost the garbage collector nothing, lists do


class Scheduler:
    """Owns the sequences, the pages and the slots of one engine. Not thread-safe: one thread calls it."""

    def __init__(self, limits: SchedulerLimits, eos_token_ids: Array[int] = ()):
        self.limits = limits
        self.cache = PrefixCache(limits.num_kv_pages, limits.page_size, enabled=limits.enable_prefix_caching)
        self.pool = self.cache.pool
        self.counters = SchedulerCounters()
        self._eos_ids = frozenset(eos_token_ids)
        self._waiting: OrderedDict[str, Sequence] = OrderedDict()
        self._running: OrderedDict[str, Sequence] = OrderedDict()  # oldest admission first
        self._free_slots = list(reversed(range(limits.num_slots)))
        self._next_step = 0
        self._last_committed = -1
        self._deferred: dict[int, list[tuple[list[int], int]]] = {}  # step -> pages and slots to free at its commit
        self._num_deferred_pages = 0

    # ------------------------------------------------------------------ requests

    def check_request(self, request: Request) -> None:
        """Refuse what can never run. Reads only limits, so any thread may call it.

        Raises:
            RequestError: the prompt is empty, or prompt and answer don't fit the context; ``.param`` names the field.
        """
        limit, num_prompt, sampling = self.limits.max_model_len, len(request.prompt_token_ids), request.sampling
        if num_prompt == 0:
            raise RequestError("the prompt has no tokens", param="prompt")
        if num_prompt >= limit:
            raise RequestError(
                f"the prompt has {num_prompt} tokens and leaves no room for an answer: the model's context length is "
                f"{limit} tokens",
                param="prompt",
            )
        if sampling.max_tokens is not None and num_prompt + sampling.max_tokens > limit:
            raise RequestError(
                f"max_tokens is {sampling.max_tokens} and the prompt has {num_prompt} tokens: together they pass the "
                f"model's context length of {limit} tokens",
                param="max_tokens",
            )
        if sampling.min_tokens and len(self._end_ids(sampling)) > MAX_FORBIDDEN_IDS:
            raise RequestError(
                f"min_tokens can hold back at most {MAX_FORBIDDEN_IDS} end tokens; stop_token_ids and the model's own "
                f"are {len(self._end_ids(sampling))}",
                param="min_tokens",
            )

    def add(self, request: Request) -> Sequence:
        """Queue a request.

        Raises:
            RequestError: it can never run, or its id is in use. Nothing is kept of it.
        """
        self.check_request(request)
        limits = self.limits
        if request.request_id in self._waiting or request.request_id in self._running:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
        sequence = Sequence(
            request=request,
            token_ids=list(request.prompt_token_ids),
            max_total_tokens=limits.max_model_len if max_tokens is None else num_prompt + max_tokens,
            end_ids=self._end_ids(request.sampling),
        )
        self._waiting[request.request_id] = sequence
        return sequence

    def finish(self, request_id: str, reason: FinishReason) -> Sequence | None:
        """End a request from outside (an abort, a stop string). Returns its sequence, None if it isn't here."""
        sequence = self._waiting.get(request_id) or self._running.get(request_id)
        if sequence is not None:
            self._retire(sequence, reason)
        return sequence

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_requests(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def num_live_pages(self) -> int:
        """Pages held for requests; pages kept only for reuse are not among them."""
        return self.pool.num_used

    # ------------------------------------------------------------------ a step

    def plan(self) -> StepPlan | None:
        """Decide the next step; None if nothing can be computed before a step in flight commits."""
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        for sequence in self._running.values():
            remaining = sequence.num_predicted - sequence.num_scheduled
            if remaining > 1:
                prompts.append(sequence)
            elif remaining and sequence.num_predicted < sequence.max_total_tokens:
                decodes.append(sequence)
        preempted = self._reserve(decodes)
        if preempted:
            decodes = [sequence for sequence in decodes if sequence.status is RUNNING]
            prompts = [sequence for sequence in prompts if sequence.status is RUNNING]
        step, budget = self._next_step, self.limits.max_num_batched_tokens
        rows = self._decode(decodes, budget, step)
        num_decodes = len(rows)
        budget -= num_decodes
        for sequence in prompts:
            if budget:
                rows.append(self._chunk(sequence, budget, step))
                budget -= rows[-1].num_tokens
        while budget and not preempted and (row := self._admit(budget, step)):
            rows.append(row)
            budget -= row.num_tokens
        if not rows:
            return None
        self._next_step += 1
        return StepPlan(step, rows, self.limits.max_num_batched_tokens - budget, num_decodes)

    def commit(self, plan: StepPlan, sampled: Array[int]) -> list[TokenEvent]:
        """Learn the tokens of the oldest planned step that has not committed; ``sampled[i]`` belongs to row ``i``."""
        if plan.step != self._last_committed + 1:
            raise RuntimeError(f"step {plan.step} commits after step {self._last_committed}: steps commit in order")
        self._last_committed = plan.step
        events: list[TokenEvent] = []
        size, caching = self.limits.page_size, self.cache.enabled
        for row, token_id in zip(plan.rows, sampled, strict=True):
            sequence = row.sequence
            if sequence.status is FINISHED:
                continue  # it ended while this step ran: the token is discarded
            if row.generation == sequence.generation:
                computed = sequence.num_computed = row.start + len(row.token_ids)
                if caching and computed >= (sequence.num_registered_pages + 1) * size:
                    self._register_pages(sequence)
            if row.samples:
                token_ids = sequence.token_ids
                token_ids.append(token_id)
                event = TokenEvent(sequence, token_id)
                events.append(event)
                if token_id in sequence.end_ids or len(token_ids) >= sequence.max_total_tokens:
                    self._end(event)
        self.counters.generated_tokens += len(events)
        for pages, slot in self._deferred.pop(plan.step, ()):
            self._num_deferred_pages -= len(pages)
            self._free(pages, slot)
        return events

    def check(self) -> None:
        """Raise AssertionError unless every invariant of pages, slots and counters holds."""
        self.cache.check()
        references = [0] * (self.pool.num_pages + 1)
        deferred = [entry for entries in self._deferred.values() for entry in entries]
        tables = [sequence.pages for sequence in self._running.values()] + [pages for pages, _ in deferred]
        for pages in tables:
            for page in pages:
                references[page] += 1
        for page in range(1, self.pool.num_pages + 1):
            assert references[page] == self.pool.refcount(page), f"page {page}: {references[page]} tables name it"
        assert self._num_deferred_pages == sum(len(pages) for pages, _ in deferred)
        slots = [sequence.slot for sequence in self._running.values()] + [slot for _, slot in deferred]
        assert sorted(slots + self._free_slots) == list(range(self.limits.num_slots)), "a slot is lost or shared"
        assert len(self._running) <= self.limits.max_num_seqs
        for sequence in self._running.values():
            assert sequence.status is Status.RUNNING
            assert 0 <= sequence.num_computed <= sequence.num_scheduled <= sequence.num_predicted
            assert sequence.num_scheduled <= len(sequence.pages) * self.limits.page_size
            assert len(sequence.token_ids) < sequence.max_total_tokens
        for sequence in self._waiting.values():
            assert sequence.status is Status.WAITING and not sequence.pages and sequence.slot == -1

    # ------------------------------------------------------------------ inside a plan

    def _reserve(self, decodes: list[Sequence]) -> bool:
        """Preempt from the newest until every decode can have its next position. True if any was preempted.

        Pages of a victim whose step is in flight come back only when that step commits. They count here, so that
        one shortage takes no more victims than it must; decodes that they are needed for skip this step.
        """
        preempted = False
        while True:
            needed = 0
            for sequence in decodes:
                if sequence.num_scheduled == sequence.capacity and sequence.status is RUNNING:
                    needed += 1
            if needed <= self.pool.num_free + self._num_deferred_pages:
                return preempted
            self._preempt(next(reversed(self._running.values())))
            preempted = True

    def _decode(self, decodes: list[Sequence], budget: int, step: int) -> list[PlanRow]:
        """A row of one token for each. One that needs a page is left out while none is free.

        This runs for every token that is generated: no call, no property, no allocation but the row.
        """
        rows: list[PlanRow] = []
        for sequence in decodes:
            if len(rows) == budget:
                break
            start = sequence.num_scheduled
            if start == sequence.capacity:
                if self.pool.num_free:
                    rows.append(self._row(sequence, 1, step, self.pool.allocate(1)))
                continue
            token_ids = sequence.token_ids
            tokens = (token_ids[start],) if start < len(token_ids) else _NEXT
            rows.append(PlanRow(sequence, sequence.generation, sequence.slot, tokens, start, True, 0, ()))
            sequence.num_scheduled = start + 1
            sequence.num_predicted += 1
            sequence.last_step = step
        return rows

    def _chunk(self, sequence: Sequence, budget: int, step: int) -> PlanRow:
        """A started prompt's next chunk. Its pages were taken at admission."""
        return self._row(sequence, min(budget, sequence.num_remaining), step, [])

    def _admit(self, budget: int, step: int) -> PlanRow | None:
        """Admit the head of the queue if a slot and the pages of all its tokens, and of one more, are there."""
        sequence = next(iter(self._waiting.values()), None)
        if sequence is None or len(self._running) >= self.limits.max_num_seqs or not self._free_slots:
            return None
        if sequence.last_step > self._last_committed:
            return None  # preempted with a token in flight: what is to be computed isn't known yet
        cached, node = self.cache.match(sequence.token_ids, len(sequence.token_ids) - 1)
        total = len(sequence.token_ids) // self.limits.page_size + 1
        reserve = int(self.limits.admission_watermark * self.pool.num_pages) if self._running else 0
        revived = sum(self.pool.refcount(page) == 0 for page in cached)
        if total - len(cached) + revived + reserve > self.pool.num_free:
            return None
        del self._waiting[sequence.request.request_id]
        self._running[sequence.request.request_id] = sequence
        for page in cached:
            self.pool.retain(page)
        sequence.pages = list(cached)
        sequence.capacity = len(cached) * self.limits.page_size
        sequence.slot = self._free_slots.pop()
        sequence.status = Status.RUNNING
        sequence.num_computed = sequence.num_scheduled = len(cached) * self.limits.page_size
        sequence.num_registered_pages, sequence.prefix_node = len(cached), node
        if not sequence.admitted_once:
            sequence.admitted_once = True
            sequence.num_cached_tokens = sequence.num_computed
            self.counters.prompt_tokens += sequence.num_prompt_tokens
            self.counters.prompt_tokens_cached += sequence.num_cached_tokens
        new_pages = self.pool.allocate(total - len(cached))
        row = self._row(sequence, min(budget, sequence.num_remaining), step, new_pages)
        row.first_new_page, row.new_pages = 0, list(sequence.pages)  # the slot's table still holds its last owner's
        return row

    def _row(self, sequence: Sequence, num_tokens: int, step: int, new_pages: list[int]) -> PlanRow:
        start = sequence.num_scheduled
        token_ids = sequence.token_ids[start : start + num_tokens]
        if len(token_ids) < num_tokens:
            token_ids.append(IN_FLIGHT)
        row = PlanRow(
            sequence=sequence,
            generation=sequence.generation,
            slot=sequence.slot,
            token_ids=token_ids,
            start=start,
            samples=start + num_tokens == sequence.num_predicted,
            first_new_page=len(sequence.pages),
            new_pages=new_pages,
        )
        sequence.pages += new_pages
        sequence.capacity += len(new_pages) * self.limits.page_size
        sequence.num_scheduled += num_tokens
        sequence.num_predicted += row.samples
        sequence.last_step = step
        return row

    # ------------------------------------------------------------------ ends of a sequence

    def _end_ids(self, sampling: SamplingParams) -> frozenset[int]:
        own = frozenset(sampling.stop_token_ids)
        return own if sampling.ignore_eos else own | self._eos_ids

    def _end(self, event: TokenEvent) -> None:
        """The token is an end token, or the last that fits."""
        sequence, token_id = event.sequence, event.token_id
        sampling = sequence.request.sampling
        if token_id in sequence.end_ids and sequence.num_generated > sampling.min_tokens:
            event.finish_reason = FinishReason.STOP
            event.stop_id = token_id if token_id in sampling.stop_token_ids else None
        elif len(sequence.token_ids) >= sequence.max_total_tokens:
            event.finish_reason = FinishReason.LENGTH
        if event.finish_reason is not None:
            self._retire(sequence, event.finish_reason)

    def _register_pages(self, sequence: Sequence) -> None:
        """Make the pages that are full and computed known to the prefix cache."""
        size = self.limits.page_size
        for index in range(sequence.num_registered_pages, sequence.num_computed // size):
            token_ids = tuple(sequence.token_ids[index * size : (index + 1) * size])
            sequence.prefix_node = self.cache.register(sequence.prefix_node, token_ids, sequence.pages[index])
            sequence.num_registered_pages = index + 1

    def _preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's pages; it is the first to come back, and computes its tokens again."""
        del self._running[sequence.request.request_id]
        self._give_back(sequence)
        sequence.status = Status.WAITING
        sequence.num_preemptions += 1
        self.counters.preemptions += 1
        self._waiting[sequence.request.request_id] = sequence
        self._waiting.move_to_end(sequence.request.request_id, last=False)

    def _retire(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.status is Status.RUNNING:
            del self._running[sequence.request.request_id]
            self._give_back(sequence)
        else:
            del self._waiting[sequence.request.request_id]
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason

    def _give_back(self, sequence: Sequence) -> None:
        """Free pages and slot, or leave it to the commit of the last step that names them."""
        pages, slot = sequence.pages, sequence.slot
        sequence.pages, sequence.slot, sequence.capacity = [], -1, 0
        sequence.generation += 1
        sequence.num_scheduled = sequence.num_computed = sequence.num_registered_pages = 0
        sequence.prefix_node = ROOT
        if sequence.last_step > self._last_committed:
            self._deferred.setdefault(sequence.last_step, []).append((pages, slot))
            self._num_deferred_pages += len(pages)
        else:
            self._free(pages, slot)

    def _free(self, pages: list[int], slot: int) -> None:
        self.pool.release(reversed(pages))
        self._free_slots.append(slot)
