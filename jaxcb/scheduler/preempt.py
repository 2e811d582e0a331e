"""Preemption: who gives way when pages are short, or to whom is more urgent, and what becomes of its KV."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from jaxcb.scheduler.admission import Admission
from jaxcb.scheduler.knobs import SchedulerLimits
from jaxcb.scheduler.memory import SequenceMemory
from jaxcb.scheduler.policy import Policy
from jaxcb.scheduler.roster import Roster
from jaxcb.scheduler.rows import needs_page
from jaxcb.scheduler.sequence import Sequence
from jaxcb.scheduler.step_time import StepTimeFit


class Preemption:
    """Takes running sequences back to the queue."""

    def __init__(
        self, limits: SchedulerLimits, policy: Policy, memory: SequenceMemory, roster: Roster, step_time: StepTimeFit
    ):
        self._limits, self._policy, self._memory, self._roster = limits, policy, memory, roster
        self._step_time = step_time
        self.host_page_s = limits.host_page_s
        """Seconds in which a page moves over the host link, one way."""

    def reserve(self, decoding: list[Sequence]) -> bool:
        """Preempt until every decode can have its next position. True if any was preempted.

        Pages of a victim whose step is in flight come back only when that step commits. They count here, so that
        one shortage takes no more victims than it must; decodes that they are needed for skip this step.
        """
        memory, running = self._memory, self._roster.running
        if len(decoding) <= memory.pool.num_free:
            return False
        preempted = False
        while num_pages_needed(decoding) > memory.pool.num_free + memory.num_deferred_pages:
            self.preempt(choose_victim(running.values(), self._limits, self._policy))
            preempted = True
        return preempted

    def make_way(self, admission: Admission) -> None:
        """Preempt running work of a lower priority if the head of the queue can't be admitted beside it."""
        memory, running = self._memory, self._roster.running
        head = self._roster.waiting.head()
        if head is None or head.last_step > memory.last_committed:
            return
        if all(sequence.request.priority <= head.request.priority for sequence in running.values()):
            return
        num_free = memory.pool.num_free + memory.num_deferred_pages
        num_needed = admission.pages_needed(head)
        if num_needed > num_free or len(running) >= self._limits.max_num_seqs:
            for sequence in choose_outranked(head, num_needed, running.values(), num_free):
                self.preempt(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence's pages: its KV moves to host memory, or is computed again."""
        self._roster.preempt(sequence, swap=self._should_swap(sequence))

    def _should_swap(self, sequence: Sequence) -> bool:
        """Whether the victim's KV moves to host memory, rather than being computed again.

        "auto" compares moving its pages there and back, over the link as it was measured, with what computing its
        tokens again adds to later steps, by the model that is fitted to the steps so far. Short contexts are computed
        sooner than moved, long ones, whose chunks read all that came before, the other way round.
        """
        limits, fit = self._limits, self._step_time
        if limits.preemption == "recompute":
            return False
        num_pages = limits.num_pages(sequence.num_scheduled) - sequence.num_behind_window
        if num_pages > self._memory.host.num_free:
            return False
        if limits.preemption == "swap":
            return True
        recompute_s = fit.recompute_s(sequence.num_scheduled, limits.chunk_limit) if fit.fitted else 0.0
        return 2 * num_pages * self.host_page_s < recompute_s


def num_pages_needed(decoding: list[Sequence]) -> int:
    """Pages without which some decodes can't go on."""
    paused = [sequence for sequence in decoding if sequence.num_scheduled >= sequence.pause_at]
    return sum(sequence.decoding and needs_page(sequence) for sequence in paused)


def choose_victim(running: Collection[Sequence], limits: SchedulerLimits, policy: Policy) -> Sequence:
    """Who gives way to the others. ``running`` is in the order of admission.

    One sequence is never chosen while there are others, so it goes on and finishes: the first of the queue's order if
    the policy preempts, else the oldest.
    """
    if policy.preempts:
        return max(running, key=lambda sequence: sequence.rank)
    if limits.victim == "least_progress" and len(running) > 1:
        return min(islice(running, 1, None), key=lambda sequence: sequence.num_computed)
    return next(reversed(running))  # type: ignore[call-overload]  # values of an ordered dict can be reversed


def choose_outranked(head: Sequence, num_needed: int, running: Collection[Sequence], num_free: int) -> list[Sequence]:
    """Running sequences of a lower priority that stand behind ``head``: as few, but at least one, as make
    ``num_needed`` pages free; none if all of them would not do."""
    behind = [s for s in running if s.request.priority > head.request.priority and s.rank > head.rank]
    behind.sort(key=lambda sequence: sequence.rank, reverse=True)
    for count, sequence in enumerate(behind, start=1):
        num_free += len(sequence.pages)
        if num_free >= num_needed:
            return behind[:count]
    return []
