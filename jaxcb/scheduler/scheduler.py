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

``roster.py`` knows who waits and who runs; ``memory.py`` alone takes pages and slots and gives them back.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from jaxcb.errors import RequestError
from jaxcb.paging import PageMoves
from jaxcb.request import FinishReason, Request
from jaxcb.scheduler.admission import Admission
from jaxcb.scheduler.checks import check_request
from jaxcb.scheduler.chunks import Chunk, PromptBudget, prompt_tokens
from jaxcb.scheduler.commit import Commit
from jaxcb.scheduler.handover import Handover
from jaxcb.scheduler.knobs import SchedulerLimits
from jaxcb.scheduler.load import load_of
from jaxcb.scheduler.memory import SequenceMemory
from jaxcb.scheduler.plan import Sampled, StepPlan, StepTokens
from jaxcb.scheduler.policy import policy_of
from jaxcb.scheduler.preempt import Preemption, num_pages_needed
from jaxcb.scheduler.prefixes import Prefixes
from jaxcb.scheduler.roster import Roster
from jaxcb.scheduler.rows import Decodes, Drafter, add_drafts, add_foreseen, chunk_row, take_positions
from jaxcb.scheduler.sequence import Sequence
from jaxcb.scheduler.step_time import StepTimeFit


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
        eos_token_ids: Seq[int] = (),
        *,
        drafter: Drafter | None = None,
        num_draft_tokens: int = 0,
    ):
        self.limits = limits
        self.step_time = StepTimeFit()
        self._drafter, self._num_draft_tokens = drafter, num_draft_tokens
        self._policy = policy_of(limits.policy)
        self._memory = SequenceMemory(limits)
        self.cache, self.pool, self.host = self._memory.cache, self._memory.pool, self._memory.host
        self.prefixes = Prefixes(limits, self.cache)
        self.roster = Roster(limits, eos_token_ids, self._memory, self._policy)
        self.counters = self.roster.counters
        self._admission = Admission(limits, self._memory, self.roster)
        self.handover = Handover(limits, self._memory, self.roster)
        """Sequences whose prompt another engine computes, and pages that other engines take."""
        self.preemption = Preemption(limits, self._policy, self._memory, self.roster, self.step_time)
        self.weighs_swaps = limits.preemption == "auto" and limits.num_host_pages > 0
        """Preemption compares what moving and what recomputing take."""
        self._foresees = False
        self._learns_step_time = limits.itl_target_ms is not None or self.weighs_swaps

    # ------------------------------------------------------------------ requests

    def check_request(self, request: Request) -> None:
        """Refuse what can never run. Reads only limits, so any thread may call it.

        Raises:
            RequestError: the prompt is empty, or prompt and answer don't fit the context or the pool, or a number is
                none; ``.param`` names the field.
        """
        check_request(request, self.limits, self.roster.end_ids(request.sampling))

    def add(self, request: Request, *, parent_id: str | None = None) -> Sequence:
        """Queue a request.

        With ``parent_id`` it is a fork: if that sequence still runs when this one is admitted, they share the full
        pages of what their tokens begin with alike, and the page in which they part is copied.

        Raises:
            RequestError: it can never run, its id is in use, there is no such parent, or a policy or a predictor of the
                user's fails for it. Nothing is kept of it.
        """
        self.check_request(request)
        self.roster.check_id(request.request_id)
        parent = None
        if parent_id is not None and (parent := self.roster.find(parent_id)) is None:
            raise RequestError(f"there is no request {parent_id!r} to fork", param="parent_id")
        return self.roster.queue_up(request, parent, held_back=False)

    def add_choices(self, requests: Seq[Request]) -> list[Sequence]:
        """Queue several answers to one prompt (n > 1). The first computes it, the others fork from that.

        Raises:
            RequestError: as for :meth:`add`, of one of them, or they are more than can run together. Nothing is kept
                of any.
        """
        if len(requests) > self.limits.max_num_seqs:
            raise RequestError(
                f"n is {len(requests)}, and at most {self.limits.max_num_seqs} sequences run at once", param="n"
            )
        for request in requests:
            self.check_request(request)
            self.roster.check_id(request.request_id)
        if len({request.request_id for request in requests}) < len(requests):
            raise RequestError("the choices of a request need different ids", param="request_id")
        queued: list[Sequence] = []
        try:
            for request in requests:
                queued.append(self.roster.queue_up(request, queued[0] if queued else None, held_back=bool(queued)))
        except RequestError:
            for sequence in queued:
                self.roster.waiting.remove(sequence)
            raise
        queued[0].followers = queued[1:]
        return queued

    def finish(self, request_id: str, reason: FinishReason) -> Sequence | None:
        """End a request from outside (an abort, a stop string). Returns its sequence, None if it isn't here."""
        sequence = self.roster.find(request_id)
        if sequence is not None:
            self.roster.retire(sequence, reason)
        elif (sequence := self.handover.expected.get(request_id)) is not None:
            self.handover.finish(sequence, reason)
        return sequence

    def foresee(self, sequence: Sequence, token_ids: Seq[int]) -> None:
        """Learn the tokens that follow a sequence's committed ones for certain, until the next call. Those after the
        one in flight are computed together, and the next token is sampled after the last of them. None of them may be
        an end token, and the device must be made to sample the first of them if it samples it."""
        sequence.foreseen = token_ids
        self._foresees = True

    @property
    def num_waiting(self) -> int:
        return len(self.roster.waiting) + len(self.handover.expected)

    @property
    def num_running(self) -> int:
        return len(self.roster.running)

    @property
    def num_swapped(self) -> int:
        """The part of ``num_waiting`` whose KV lies in host memory."""
        return self._memory.num_swapped

    @property
    def has_requests(self) -> bool:
        """Some that a plan may name; those whose prompt another engine computes are not among them."""
        return bool(self.roster.waiting or self.roster.running)

    @property
    def num_live_pages(self) -> int:
        """Pages held for requests and by pins; pages kept only for reuse are not among them."""
        return self.pool.num_used

    # ------------------------------------------------------------------ a step

    def plan(self) -> StepPlan | None:
        """Decide the next step; None if nothing can be computed before a step in flight commits."""
        limits, memory, roster = self.limits, self._memory, self.roster
        if self._policy.preempts and roster.waiting:
            self.preemption.make_way(self._admission)
        decoding, prompts = roster.sorted_running()
        preempted = False
        decodes = Decodes([], [], {})
        chunks: list[Chunk] = []
        if limits.prefill_first:
            chunks = self._divide(prompts, 0, admit=True, num_pages_owed=num_pages_needed(decoding))
        if not chunks:
            preempted = self.preemption.reserve(decoding)
            if preempted:
                decoding, prompts = roster.sorted_running()
            if self._drafter is not None:  # guesses are made from what is known
                decoding = [s for s in decoding if s.num_scheduled < len(s.token_ids)]
            decodes = take_positions(decoding, limits.max_num_batched_tokens, memory)
        num_tokens = len(decodes.sequences)
        if (prompts or roster.waiting) and not limits.prefill_first:
            chunks = self._divide(prompts, num_tokens, admit=not preempted)
        num_tokens += sum([chunk.num_tokens for chunk in chunks])
        num_drafts = num_foreseen = 0
        if self._drafter is not None:
            left = limits.max_num_batched_tokens - num_tokens
            num_drafts = add_drafts(decodes, self._drafter, self._num_draft_tokens, left, memory)
        elif self._foresees:
            num_foreseen = add_foreseen(decodes, limits.max_num_batched_tokens - num_tokens, memory)
        if not num_tokens:
            # If nothing is in flight, the one that was preempted can take up the pages that it gave back.
            return Scheduler.plan(self) if preempted and not memory.num_deferred_pages else None
        chunk_rows = [chunk_row(chunk) for chunk in chunks]
        if any(row.samples for row in chunk_rows):
            roster.has_changed()
        memory.last_planned += 1
        return StepPlan(
            step=memory.last_planned,
            decoding=decodes.sequences,
            slots=[sequence.slot for sequence in decodes.sequences],
            starts=decodes.starts,
            others=decodes.others,
            chunks=chunk_rows,
            num_tokens=num_tokens + num_drafts + num_foreseen,
            num_drafts=num_drafts,
            num_foreseen=num_foreseen,
            moves=self.cache.take_moves(),
        )

    def commit(self, plan: StepPlan, sampled: Seq[Sampled]) -> StepTokens:
        """Learn the tokens of the oldest planned step that has not committed; ``sampled[i]`` belongs to row ``i``.

        It is a list where the row has drafts: those that were accepted, and the token after them.
        """
        memory, step, num_decodes = self._memory, plan.step, plan.num_decodes
        if step != memory.last_committed + 1:
            raise RuntimeError(f"step {step} commits after step {memory.last_committed}: steps commit in order")
        if len(sampled) != plan.num_rows:
            raise ValueError(f"step {step} has {plan.num_rows} rows, got tokens for {len(sampled)}")
        commit = Commit(step, memory, self.roster)
        if plan.num_drafts:
            commit.verified(plan.rows[:num_decodes], sampled[:num_decodes])
        else:
            if plan.num_foreseen:
                commit.foreseen(plan.others.values())
            commit.decodes(plan.decoding, sampled[:num_decodes])  # type: ignore[arg-type]  # no drafts: one token each
        commit.chunks(plan.chunks, sampled[num_decodes:])
        self.counters.generated_tokens += len(commit.tokens)
        memory.committed(step)
        return commit.tokens

    def take_moves(self) -> PageMoves | None:
        """Moves that are planned already (of pages that made room for what comes from elsewhere), for the caller to
        carry out before he writes anything. The next plan has those that come later."""
        return self.cache.take_moves()

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Learn how long a step took on the device. The ITL target and "auto" preemption go by it."""
        if self._learns_step_time:
            num_tokens = plan.num_tokens
            if not plan.decode_only:
                num_tokens = min((size for size in self.limits.step_sizes if size >= num_tokens), default=num_tokens)
            self.step_time.observe(num_tokens, load_of(plan).kv_tokens, seconds)

    def set_host_page_s(self, seconds: float) -> None:
        """Learn how long a page takes over the host link; until then ``limits.host_page_s`` counts."""
        self.preemption.host_page_s = seconds

    def restart_all(self) -> None:
        """The KV of all requests counts no more (the weights have changed, or its memory is given back): what is known
        of their tokens is computed again, and every prefix is forgotten."""
        for sequence in list(self.roster.running.values()):
            self.roster.preempt(sequence, swap=False)
        for sequence in self.roster.waiting:
            self._memory.forget_swapped(sequence)
        self.handover.take_over_all()
        self.prefixes.reset()

    def check(self) -> None:
        """Raise AssertionError unless every invariant of pages, slots and counters holds."""
        self.roster.check(self.handover.expected.values())
        self.handover.check()

    # ------------------------------------------------------------------ inside a plan

    def _divide(
        self, prompts: list[Sequence], num_decode_tokens: int, *, admit: bool, num_pages_owed: int = 0
    ) -> list[Chunk]:
        """Chunks for started prompts and newcomers, from what the budget leaves beside the decodes."""
        limits = self.limits
        num_tokens = limits.max_num_batched_tokens - num_decode_tokens
        if limits.itl_target_ms is not None and num_decode_tokens:
            num_context = sum(sequence.num_scheduled for sequence in self.roster.running.values())
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
            self._admission.fill(budget, num_pages_owed)
