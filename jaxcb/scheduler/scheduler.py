"""The Scheduler: iteration-level batching under a token budget, over paged KV.

``plan()`` decides a step, ``commit()`` learns its tokens. Between the two, further plans may be made (running
ahead); pages and slots that a planned step names stay owned until that step has committed.

The order within a plan, and where each idea comes from:

1. Every decoding sequence gets the KV position that it needs; while pages are short a sequence is preempted: its KV is
   computed again later, or moves to host memory (vLLM, section 4.5 of the PagedAttention paper). ``preempt.py``
2. One token for each decode. Prompts never delay them (Sarathi-Serve's stall-free batching).
3. Chunks of prompts that were started. ``chunks.py``
4. New sequences, in the order of the policy, while slots, budget and pages last (Orca's iteration-level scheduling).
   ``admission.py``, ``queue.py``, ``policy.py``

``memory.py`` alone takes pages and slots and gives them back.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence as Array

from jaxcb.errors import RequestError
from jaxcb.paging import pack_tokens
from jaxcb.paging.prefix import TOKEN_BYTES
from jaxcb.request import FinishReason, Request, SamplingParams
from jaxcb.scheduler.admission import Admission
from jaxcb.scheduler.checks import check_request
from jaxcb.scheduler.chunks import Chunk, PromptBudget, prompt_tokens
from jaxcb.scheduler.knobs import SchedulerLimits
from jaxcb.scheduler.memory import SequenceMemory
from jaxcb.scheduler.plan import Row, Sampled, StepPlan, TokenEvent
from jaxcb.scheduler.policy import policy_of
from jaxcb.scheduler.preempt import choose_outranked, choose_victim, should_swap
from jaxcb.scheduler.queue import WaitingQueue
from jaxcb.scheduler.rows import Drafter, add_drafts, chunk_row, decode_rows, num_pages_needed
from jaxcb.scheduler.sequence import Sequence, Status
from jaxcb.scheduler.step_time import StepTimeFit
from jaxcb.scheduler.view import View

_new = tuple.__new__  # of a named tuple: half the time of its own constructor


@dataclasses.dataclass
class SchedulerCounters:
    """Totals since the start."""

    prompt_tokens: int = 0
    """Of admitted requests."""
    prompt_tokens_cached: int = 0
    """The part of ``prompt_tokens`` that the prefix cache gave."""
    generated_tokens: int = 0
    preemptions: int = 0
    swaps: int = 0
    """Preemptions that moved the KV to host memory."""
    draft_tokens: int = 0
    """Guesses that steps computed."""
    draft_tokens_accepted: int = 0


class Scheduler:
    """Owns the sequences, the pages and the slots of one engine. Not thread-safe: one thread calls it.

    Arguments:
        limits: what it may use, and every knob.
        eos_token_ids: ids that end a sequence unless its request ignores them.
        drafter: speculation: guesses tokens that the next step verifies. Sequences then wait for each commit, since
            the number of tokens that it brings isn't known before.
        num_draft_tokens: most guesses a sequence and step.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        eos_token_ids: Array[int] = (),
        *,
        drafter: Drafter | None = None,
        num_draft_tokens: int = 0,
    ):
        self.limits = limits
        self.counters = SchedulerCounters()
        self.step_time = StepTimeFit()
        self._eos_ids = frozenset(eos_token_ids)
        self._drafter, self._num_draft_tokens = drafter, num_draft_tokens
        self._memory = SequenceMemory(limits)
        self.cache, self.pool, self.host = self._memory.cache, self._memory.pool, self._memory.host
        self._running: OrderedDict[str, Sequence] = OrderedDict()  # oldest admission first
        self._policy = policy_of(limits.policy)
        self._view = View(limits, self.cache)
        self._queue = WaitingQueue(
            self._policy, lambda sequence: self._policy.key(sequence, self._view), limits.max_overtakes
        )
        self._admission = Admission(limits, self._memory, self._queue, self._running)
        self._learns_step_time = limits.itl_target_ms is not None or (
            limits.preemption == "auto" and limits.num_host_pages > 0
        )
        self._num_added = 0
        self._decoding: list[Sequence] = []
        self._prompts: list[Sequence] = []
        self._sort_again = False
        """``_running`` or what its sequences do has changed since it was sorted into these two."""

    # ------------------------------------------------------------------ requests

    def check_request(self, request: Request) -> None:
        """Refuse what can never run. Reads only limits, so any thread may call it.

        Raises:
            RequestError: the prompt is empty, or prompt and answer don't fit the context or the pool, or a number is
                none; ``.param`` names the field.
        """
        check_request(request, self.limits, self._end_ids(request.sampling))

    def add(self, request: Request, *, parent_id: str | None = None) -> Sequence:
        """Queue a request.

        With ``parent_id`` it is a fork: if that sequence still runs when this one is admitted, they share the full
        pages of what their tokens begin with alike, and the page in which they part is copied.

        Raises:
            RequestError: it can never run, its id is in use, or there is no such parent. Nothing is kept of it.
        """
        self.check_request(request)
        self._check_id(request.request_id)
        parent = None
        if parent_id is not None and (parent := self._find(parent_id)) is None:
            raise RequestError(f"there is no request {parent_id!r} to fork", param="parent_id")
        return self._queue_up(request, parent, held_back=False)

    def add_choices(self, requests: Array[Request]) -> list[Sequence]:
        """Queue several answers to one prompt (n > 1). The first computes it, the others fork from that.

        Raises:
            RequestError: one of them can never run, or they are more than can run together. Nothing is kept of any.
        """
        if len(requests) > self.limits.max_num_seqs:
            raise RequestError(
                f"n is {len(requests)}, and at most {self.limits.max_num_seqs} sequences run at once", param="n"
            )
        for request in requests:
            self.check_request(request)
            self._check_id(request.request_id)
        if len({request.request_id for request in requests}) < len(requests):
            raise RequestError("the choices of a request need different ids", param="request_id")
        first = self._queue_up(requests[0], None, held_back=False)
        others = [self._queue_up(request, first, held_back=True) for request in requests[1:]]
        first.followers += others
        return [first, *others]

    def finish(self, request_id: str, reason: FinishReason) -> Sequence | None:
        """End a request from outside (an abort, a stop string). Returns its sequence, None if it isn't here."""
        sequence = self._find(request_id)
        if sequence is not None:
            self._retire(sequence, reason)
        return sequence

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_requests(self) -> bool:
        return bool(self._queue or self._running)

    @property
    def num_live_pages(self) -> int:
        """Pages held for requests and by pins; pages kept only for reuse are not among them."""
        return self.pool.num_used

    # ------------------------------------------------------------------ prefixes

    def pin_prefix(self, token_ids: Array[int], cache_salt: str = "") -> int:
        """Keep the known full pages of a beginning (a system prompt, say) from eviction.

        Returns:
            Tokens that are pinned.

        Raises:
            RequestError: with so many pages pinned the longest sequence would not fit the pool any more.
        """
        root, tokens = self.cache.root(self._salt(cache_salt)), pack_tokens(token_ids)
        pages = self.cache.match(root, tokens, len(token_ids)).pages
        num_pinned = len({*self.cache.pinned_pages, *pages})
        longest = self.limits.num_pages(self.limits.max_model_len)
        num_left = self.limits.num_kv_pages - num_pinned
        if num_left < longest or self.cache.num_to_take(pages) > self.pool.num_free:
            raise RequestError(
                f"{num_pinned} pinned pages would leave {num_left} of {self.limits.num_kv_pages}; the longest sequence "
                f"needs {longest}, and what runs needs {self.pool.num_used}",
                param="token_ids",
            )
        return self.cache.pin(root, tokens) * self.limits.page_size

    def unpin_prefixes(self) -> None:
        """Undo every pin."""
        self.cache.unpin()

    def reset_prefixes(self) -> None:
        """Forget what is cached, pins included (the weights have changed, say)."""
        self.cache.reset()

    def place_prefix(self, token_ids: Array[int], cache_salt: str = "") -> list[tuple[int, int]]:
        """Take pages for a beginning whose KV was computed elsewhere (on another engine, say) and make them known. They
        are cached, not pinned.

        Returns:
            (index in the beginning, page) of those whose content the caller brings before the next plan runs: its full
            pages, as many as are free, without those that were known.
        """
        if not self.cache.enabled:
            return []
        size, packed, cache = self.limits.page_size, pack_tokens(token_ids), self.cache
        page_bytes = size * TOKEN_BYTES
        match = cache.match(cache.root(self._salt(cache_salt)), packed, len(token_ids), on_device=True)
        known, node = cache.take(match.pages), match.node
        new = self.pool.allocate(min(len(token_ids) // size - len(known), self.pool.num_free))
        twins = []
        for index, page in enumerate(new, len(known)):
            node, other = cache.register(node, packed[index * page_bytes : (index + 1) * page_bytes], page)
            if other != page:
                twins.append(other)
        placed = [(index, page) for index, page in enumerate(new, len(known)) if self.pool.is_reusable(page)]
        self.pool.release((*reversed(twins), *reversed(new), *reversed(known)))
        return placed

    # ------------------------------------------------------------------ a step

    def plan(self) -> StepPlan | None:
        """Decide the next step; None if nothing can be computed before a step in flight commits."""
        if self._policy.preempts and self._queue:
            self._make_way()
        decodes, prompts = self._sort_running()
        preempted = False
        rows: list[Row] = []
        chunks: list[Chunk] = []
        if self.limits.prefill_first:
            chunks = self._divide(prompts, 0, admit=True, num_pages_owed=num_pages_needed(decodes))
        if not chunks:
            preempted = self._reserve(decodes)
            if preempted:
                decodes, prompts = self._sort_running()
            if self._drafter is not None:  # guesses are made from what is known
                decodes = [s for s in decodes if s.num_scheduled < len(s.token_ids)]
            rows = decode_rows(decodes, self.limits.max_num_batched_tokens, self._memory)
        num_decodes = len(rows)
        if (prompts or self._queue) and not self.limits.prefill_first:
            chunks = self._divide(prompts, num_decodes, admit=not preempted)
        num_tokens = num_decodes + sum([chunk.num_tokens for chunk in chunks])
        num_drafts = 0
        if self._drafter is not None:
            left = self.limits.max_num_batched_tokens - num_tokens
            num_drafts = add_drafts(rows, self._drafter, self._num_draft_tokens, left, self._memory)
        for chunk in chunks:
            rows.append(chunk_row(chunk))
            self._sort_again |= chunk.is_new or chunk.sequence.decoding
        if not rows:
            # If nothing is in flight, the one that was preempted can take up the pages that it gave back.
            return Scheduler.plan(self) if preempted and not self._memory.num_deferred_pages else None
        self._memory.last_planned += 1
        moves = self.cache.take_moves()
        return StepPlan(self._memory.last_planned, rows, num_tokens + num_drafts, num_decodes, num_drafts, moves)

    def commit(self, plan: StepPlan, sampled: Array[Sampled]) -> list[TokenEvent]:
        """Learn the tokens of the oldest planned step that has not committed; ``sampled[i]`` belongs to row ``i``.

        It is a list where the row has drafts: those that were accepted, and the token after them.

        This runs for every token that is generated: no call, no property, no allocation but the event.
        """
        memory, step = self._memory, plan.step
        if step != memory.last_committed + 1:
            raise RuntimeError(f"step {step} commits after step {memory.last_committed}: steps commit in order")
        if len(sampled) != len(plan.rows):
            raise ValueError(f"step {step} has {len(plan.rows)} rows, got tokens for {len(sampled)}")
        events: list[TokenEvent] = []
        for row, token_id in zip(plan.rows[: plan.num_decodes], sampled, strict=False):
            sequence = row.sequence
            if sequence.valid_from > step or row.num_drafts:
                self._commit_late_or_many(row, step, token_id, events)
                continue
            token_ids = sequence.token_ids
            token_ids.append(token_id)  # type: ignore[arg-type]  # a row without drafts has one token
            events.append(_new(TokenEvent, (sequence, token_id, None, None, None, None)))
            if token_id in sequence.end_ids or len(token_ids) >= sequence.look_at:
                self._look_at(sequence, events)
        for row, token_id in zip(plan.rows[plan.num_decodes :], sampled[plan.num_decodes :], strict=True):
            self._commit_chunk(row, step, token_id, events)
        self.counters.generated_tokens += len(events)
        memory.committed(step)
        return events

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Learn how long a step took on the device. The ITL target and "auto" preemption go by it."""
        if self._learns_step_time:
            num_tokens = plan.num_tokens
            if not plan.decode_only:
                num_tokens = min((size for size in self.limits.step_sizes if size >= num_tokens), default=num_tokens)
            self.step_time.observe(num_tokens, sum(row.context_len for row in plan.rows), seconds)

    def check(self) -> None:
        """Raise AssertionError unless every invariant of pages, slots and counters holds."""
        self._memory.check(self._running.values(), self._queue)
        assert len(self._running) <= self.limits.max_num_seqs
        for sequence in self._running.values():
            assert sequence.status is Status.RUNNING
            assert 0 <= sequence.num_computed <= sequence.num_scheduled
            assert sequence.decoding or sequence.num_scheduled < len(sequence.token_ids)
            assert sequence.num_scheduled <= sequence.capacity == len(sequence.pages) * self.limits.page_size
            assert len(sequence.token_ids) < sequence.max_total_tokens
            assert not sequence.host_pages and not sequence.num_swapped
        for sequence in self._queue:
            assert sequence.status is Status.WAITING and not sequence.pages and sequence.slot == -1

    # ------------------------------------------------------------------ inside a plan

    def _sort_running(self) -> tuple[list[Sequence], list[Sequence]]:
        """Those that decode, and those that take chunks."""
        if self._sort_again:
            self._sort_again = False
            self._decoding = [sequence for sequence in self._running.values() if sequence.decoding]
            self._prompts = [sequence for sequence in self._running.values() if not sequence.decoding]
        return self._decoding, self._prompts

    def _make_way(self) -> None:
        """Preempt running work of a lower priority if the head of the queue can't be admitted beside it."""
        head = self._queue.head()
        if head is None or head.last_step > self._memory.last_committed:
            return
        if all(sequence.request.priority <= head.request.priority for sequence in self._running.values()):
            return
        num_free = self.pool.num_free + self._memory.num_deferred_pages
        num_needed = self._admission.pages_needed(head)
        if num_needed > num_free or len(self._running) >= self.limits.max_num_seqs:
            for sequence in choose_outranked(head, num_needed, self._running.values(), num_free):
                self._preempt(sequence)

    def _reserve(self, decodes: list[Sequence]) -> bool:
        """Preempt until every decode can have its next position. True if any was preempted.

        Pages of a victim whose step is in flight come back only when that step commits. They count here, so that
        one shortage takes no more victims than it must; decodes that they are needed for skip this step.
        """
        memory = self._memory
        if len(decodes) <= self.pool.num_free:
            return False
        preempted = False
        needed = num_pages_needed(decodes)
        while needed > self.pool.num_free + memory.num_deferred_pages:
            self._preempt(choose_victim(self._running.values(), self.limits, self._policy))
            preempted = True
            needed = num_pages_needed(decodes)
        return preempted

    def _divide(
        self, prompts: list[Sequence], num_decode_tokens: int, *, admit: bool, num_pages_owed: int = 0
    ) -> list[Chunk]:
        """Chunks for started prompts and newcomers, from what the budget leaves beside the decodes."""
        limits = self.limits
        num_tokens = limits.max_num_batched_tokens - num_decode_tokens
        if limits.itl_target_ms is not None and num_decode_tokens:
            num_context = sum(sequence.num_scheduled for sequence in self._running.values())
            num_tokens = prompt_tokens(limits, self.step_time, num_decode_tokens, num_context)
        budget = PromptBudget(limits, num_tokens)
        self._hand_out(budget, prompts, admit, num_pages_owed)
        budget.top_up()
        if budget.left and budget.refused_long:
            served = {chunk.sequence for chunk in budget.chunks}
            rest = [sequence for sequence in prompts if sequence not in served]
            self._hand_out(budget, rest, admit, num_pages_owed)
        if limits.exact_fill:
            budget.fill_exactly(num_decode_tokens)
        return budget.chunks

    def _hand_out(self, budget: PromptBudget, prompts: list[Sequence], admit: bool, num_pages_owed: int) -> None:
        for sequence in prompts:
            if num := budget.offer(sequence.num_remaining):
                budget.take(sequence, num)
        if admit:
            for sequence in self._admission.fill(budget, num_pages_owed):
                self._count_admission(sequence)

    def _count_admission(self, sequence: Sequence) -> None:
        self._view.was_admitted(sequence)
        if not sequence.admitted_once:
            sequence.admitted_once = True
            sequence.num_cached_tokens = sequence.num_computed
            self.counters.prompt_tokens += sequence.num_prompt_tokens
            self.counters.prompt_tokens_cached += sequence.num_cached_tokens

    # ------------------------------------------------------------------ inside a commit

    def _commit_chunk(self, row: Row, step: int, token_id: Sampled, events: list[TokenEvent]) -> None:
        sequence = row.sequence
        if sequence.status is Status.FINISHED:
            return  # it ended while this step ran: the token is discarded
        if sequence.valid_from <= step:
            sequence.num_prefilled = row.context_len
            self._memory.settle(sequence)
            if sequence.followers and sequence.num_prefilled >= sequence.num_prompt_tokens:
                self._let_followers_go(sequence)
        if row.samples:
            assert isinstance(token_id, int)
            self._append(sequence, token_id, events)

    def _commit_late_or_many(self, row: Row, step: int, token_ids: Sampled, events: list[TokenEvent]) -> None:
        """A decode whose sequence has ended or given its pages back since, or which verified guesses.

        KV of rejected guesses is written over by what comes next.
        """
        sequence = row.sequence
        many = [token_ids] if isinstance(token_ids, int) else token_ids
        self.counters.draft_tokens += row.num_drafts
        self.counters.draft_tokens_accepted += len(many) - 1
        for token_id in many:
            if sequence.status is Status.FINISHED:
                return
            self._append(sequence, token_id, events)
        if sequence.valid_from <= step:
            sequence.num_scheduled = len(sequence.token_ids) - 1
            self._memory.settle(sequence)

    def _look_at(self, sequence: Sequence, events: list[TokenEvent]) -> None:
        """A page is full, or the last event's token may end its sequence."""
        self._memory.settle(sequence)
        self._end(events)

    def _append(self, sequence: Sequence, token_id: int, events: list[TokenEvent]) -> None:
        sequence.token_ids.append(token_id)
        events.append(TokenEvent(sequence, token_id))
        self._end(events)

    def _end(self, events: list[TokenEvent]) -> None:
        """End the last event's sequence if its token is an end token, or the last that fits."""
        sequence, token_id = events[-1][:2]
        sampling = sequence.request.sampling
        if token_id in sequence.end_ids and sequence.num_generated > sampling.min_tokens:
            stop_id = token_id if token_id in sampling.stop_token_ids else None
            events[-1] = TokenEvent(sequence, token_id, FinishReason.STOP, stop_id)
        elif len(sequence.token_ids) >= sequence.max_total_tokens:
            events[-1] = TokenEvent(sequence, token_id, FinishReason.LENGTH)
        if (reason := events[-1].finish_reason) is not None:
            self._retire(sequence, reason)

    # ------------------------------------------------------------------ a sequence's life

    def _check_id(self, request_id: str) -> None:
        if self._find(request_id) is not None:
            raise RequestError(f"request id {request_id!r} is in use", param="request_id")

    def _find(self, request_id: str) -> Sequence | None:
        return self._queue.get(request_id) or self._running.get(request_id)

    def _end_ids(self, sampling: SamplingParams) -> frozenset[int]:
        others = frozenset() if sampling.ignore_eos else self._eos_ids
        return others.union(sampling.stop_token_ids) if sampling.stop_token_ids else others  # most share one set

    def _queue_up(self, request: Request, parent: Sequence | None, *, held_back: bool) -> Sequence:
        limits, max_tokens = self.limits, request.sampling.max_tokens
        num_prompt = len(request.prompt_token_ids)
        longest = min(limits.max_model_len, limits.num_kv_pages * limits.page_size)
        sequence = Sequence(
            request=request,
            token_ids=list(request.prompt_token_ids),
            max_total_tokens=longest if max_tokens is None else num_prompt + max_tokens,
            end_ids=self._end_ids(request.sampling),
            salt=self._salt(request.cache_salt),
            parent=parent,
            ticket=self._num_added,
        )
        self._num_added += 1
        self._queue.add(sequence, held_back=held_back)
        return sequence

    def _preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's pages. It comes back first, and computes its tokens again or takes its KV back."""
        del self._running[sequence.request.request_id]
        self._sort_again = True
        self.counters.preemptions += 1
        sequence.num_preemptions += 1
        if should_swap(sequence, self.limits, self._memory, self.step_time):
            self.counters.swaps += 1
            self._memory.swap_out(sequence)
        else:
            self._memory.give_back(sequence)
        sequence.status = Status.WAITING
        self._let_followers_go(sequence)
        self._queue.requeue(sequence)

    def _retire(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.status is Status.RUNNING:
            del self._running[sequence.request.request_id]
            self._sort_again = True
            self._memory.give_back(sequence)
        else:
            self._queue.remove(sequence)
            self._memory.forget_swapped(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        sequence.parent = None
        self._let_followers_go(sequence)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._view.has_finished(sequence)

    def _salt(self, cache_salt: str) -> tuple[str, str]:
        return self.limits.cache_name, cache_salt

    def _let_followers_go(self, sequence: Sequence) -> None:
        """Its forks may be admitted."""
        for follower in sequence.followers:
            self._queue.let_go(follower)
        sequence.followers = []
