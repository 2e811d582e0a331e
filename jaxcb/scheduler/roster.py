"""Roster: who waits and who runs, and every way from one to the other and out."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from jaxcb.errors import RequestError
from jaxcb.request import FinishReason, Request, SamplingParams
from jaxcb.scheduler.knobs import SchedulerLimits
from jaxcb.scheduler.memory import SequenceMemory, Start
from jaxcb.scheduler.policy import Policy
from jaxcb.scheduler.queue import WaitingQueue
from jaxcb.scheduler.sequence import Sequence, Status
from jaxcb.scheduler.view import View


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


class Roster:
    """The sequences of an engine. ``memory`` takes their pages and slots and gives them back."""

    def __init__(self, limits: SchedulerLimits, eos_token_ids: Seq[int], memory: SequenceMemory, policy: Policy):
        self.counters = SchedulerCounters()
        self.running: OrderedDict[str, Sequence] = OrderedDict()  # oldest admission first
        self._limits, self._eos_ids, self._memory = limits, frozenset(eos_token_ids), memory
        self._view = View(limits, memory.cache)
        self.waiting = WaitingQueue(policy, lambda sequence: policy.key(sequence, self._view), limits.max_overtakes)
        self._longest = min(limits.max_model_len, limits.num_kv_pages * limits.page_size)
        self._num_added = 0
        self._decoding: list[Sequence] = []
        self._prompts: list[Sequence] = []
        self._sort_again = False
        """``running`` or what its sequences do has changed since it was sorted into these two."""

    def find(self, request_id: str) -> Sequence | None:
        return self.waiting.get(request_id) or self.running.get(request_id)

    def check_id(self, request_id: str) -> None:
        """Raise RequestError if the id is in use."""
        if self.find(request_id) is not None:
            raise RequestError(f"request id {request_id!r} is in use", param="request_id")

    def end_ids(self, sampling: SamplingParams) -> frozenset[int]:
        """Ids that end the answer. Most requests share one set."""
        others = frozenset() if sampling.ignore_eos else self._eos_ids
        return others.union(sampling.stop_token_ids) if sampling.stop_token_ids else others

    def sorted_running(self) -> tuple[list[Sequence], list[Sequence]]:
        """Those that decode, and those that take chunks. The lists stay as they are: a change makes new ones."""
        if self._sort_again:
            self._sort_again = False
            running = self.running.values()
            self._decoding = [sequence for sequence in running if sequence.decoding]
            some = len(self._decoding) < len(running)
            self._prompts = [sequence for sequence in running if not sequence.decoding] if some else []
        return self._decoding, self._prompts

    def has_changed(self) -> None:
        """A running sequence begins to decode."""
        self._sort_again = True

    # ------------------------------------------------------------------ a sequence's life

    def queue_up(self, request: Request, parent: Sequence | None, *, held_back: bool) -> Sequence:
        """Make a sequence of a request that has been checked, and queue it."""
        sequence = self.make(request, parent)
        self.waiting.add(sequence, held_back=held_back)
        return sequence

    def make(self, request: Request, parent: Sequence | None) -> Sequence:
        """A sequence of a request that has been checked, in no queue."""
        max_tokens = request.sampling.max_tokens
        token_ids = list(request.prompt_token_ids)
        sequence = Sequence(
            request=request,
            token_ids=token_ids,
            max_total_tokens=self._longest if max_tokens is None else len(token_ids) + max_tokens,
            end_ids=self.end_ids(request.sampling),
            salt=self._limits.salt(request.cache_salt),
            parent=parent,
            ticket=self._num_added,
        )
        self._num_added += 1
        return sequence

    def admit(self, sequence: Sequence, start: Start) -> None:
        """Let a waiting sequence run, from ``start``."""
        self.waiting.remove(sequence)
        self.waiting.was_admitted(sequence)
        self._memory.admit(sequence, start)
        self.running[sequence.request.request_id] = sequence
        self._sort_again = True
        sequence.status = Status.RUNNING
        self._view.was_admitted(sequence)
        if not sequence.admitted_once:
            self._count_admission(sequence, sequence.num_computed)

    def adopt(self, sequence: Sequence) -> None:
        """Let a sequence run whose prompt another engine has computed, and which has its pages and its slot."""
        self.waiting.rank(sequence)
        self.running[sequence.request.request_id] = sequence
        self._sort_again = True
        sequence.status = Status.RUNNING
        self._view.was_admitted(sequence)
        self._count_admission(sequence, sequence.num_cached_tokens)

    def _count_admission(self, sequence: Sequence, num_cached_tokens: int) -> None:
        sequence.admitted_once = True
        sequence.num_cached_tokens = num_cached_tokens
        self.counters.prompt_tokens += sequence.num_prompt_tokens
        self.counters.prompt_tokens_cached += num_cached_tokens

    def preempt(self, sequence: Sequence, *, swap: bool) -> None:
        """Take a running sequence's pages. It comes back first, and computes its tokens again or takes its KV back."""
        del self.running[sequence.request.request_id]
        self._sort_again = True
        self.counters.preemptions += 1
        sequence.num_preemptions += 1
        if swap:
            self.counters.swaps += 1
            self._memory.swap_out(sequence)
        else:
            self._memory.give_back(sequence)
        sequence.status = Status.WAITING
        self.let_followers_go(sequence)
        self.waiting.requeue(sequence)

    def retire(self, sequence: Sequence, reason: FinishReason) -> None:
        """It has ended."""
        if sequence.status is Status.RUNNING:
            del self.running[sequence.request.request_id]
            self._sort_again = True
            self._memory.give_back(sequence)
        else:
            self.waiting.remove(sequence)
            self._memory.forget_swapped(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        sequence.parent = None
        self.let_followers_go(sequence)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._view.has_finished(sequence)

    def let_followers_go(self, sequence: Sequence) -> None:
        """Its forks may be admitted."""
        for follower in sequence.followers:
            self.waiting.let_go(follower)
        sequence.followers = ()

    def check(self, expected: Iterable[Sequence] = ()) -> None:
        """Raise AssertionError unless every invariant of pages, slots and counters holds."""
        reserved = [sequence for sequence in expected if sequence.slot >= 0]
        self._memory.check([*self.running.values(), *reserved], self.waiting)
        assert len(self.running) <= self._limits.max_num_seqs
        for sequence in self.running.values():
            assert sequence.status is Status.RUNNING
            assert 0 <= sequence.num_computed <= sequence.num_scheduled
            assert sequence.decoding or sequence.num_scheduled < len(sequence.token_ids)
            assert sequence.num_scheduled <= sequence.capacity == len(sequence.pages) * self._limits.page_size
            assert len(sequence.token_ids) < sequence.max_total_tokens
            assert not sequence.host_pages and not sequence.num_swapped
        for sequence in self.waiting:
            assert sequence.status is Status.WAITING and not sequence.pages and sequence.slot == -1
