"""Admission: which waiting sequences start in a step."""

from __future__ import annotations

from jaxcb.scheduler.chunks import PromptBudget
from jaxcb.scheduler.knobs import SchedulerLimits
from jaxcb.scheduler.memory import SequenceMemory, Start
from jaxcb.scheduler.roster import Roster
from jaxcb.scheduler.sequence import Sequence

MAX_SET_ASIDE = 16
"""Heads that don't fit which one plan looks past."""
PLANS_BETWEEN_TRIES = 16
"""A head that didn't fit is looked at again when more pages are free, and at least this often."""


class Admission:
    """Lets sequences run."""

    def __init__(self, limits: SchedulerLimits, memory: SequenceMemory, roster: Roster):
        self._limits, self._memory, self._roster = limits, memory, roster
        self._queue, self._running = roster.waiting, roster.running
        self._batch_is_forming = True
        self._num_plans = 0
        self._last_admission = 0
        self._promised = 0

    def fill(self, budget: PromptBudget, num_pages_owed: int) -> None:
        """Admit while the head of the queue fits the slots, the pages and the budget. ``num_pages_owed`` free pages are
        those of running sequences, which wait for them."""
        self._num_plans += 1
        if not self._queue:
            self._batch_is_forming = False
            return
        if not self._is_open():
            return
        if self._limits.reservation == "guaranteed":
            others = [*self._running.values(), *self._memory.reserved]
            self._promised = sum(map(self._memory.pages_to_come, others))
        num_set_aside = 0
        while budget.left and self.has_place and (sequence := self._queue.head()):
            if sequence.last_step > self._memory.last_committed:
                break  # preempted with a token in flight: what is to be computed isn't known yet
            start = self._fitting(sequence, num_pages_owed)
            num_tokens = budget.offer(len(sequence.token_ids) - start.num_computed) if start else 0
            if start and num_tokens:
                self._admit(sequence, start)
                budget.take(sequence, num_tokens, is_new=True)
            elif sequence.num_overtaken < self._limits.max_passes and num_set_aside < MAX_SET_ASIDE:
                self._queue.set_aside(sequence)
                num_set_aside += 1
            else:
                break
        self._queue.restore()
        self._batch_is_forming = bool(self._queue) and (not budget.left or budget.refused_long)

    @property
    def has_place(self) -> bool:
        """One more sequence may run."""
        num_seats_taken = len(self._running) + len(self._memory.reserved)
        return num_seats_taken < self._limits.max_num_seqs and bool(self._memory.free_slots)

    def pages_needed(self, sequence: Sequence) -> int:
        """Free pages that its admission takes."""
        return self._memory.start_of(sequence).num_free_needed

    def _is_open(self) -> bool:
        limits, num_running = self._limits, len(self._running)
        if not num_running:
            return True
        if limits.batching == "static":
            return self._batch_is_forming
        waited = self._num_plans - self._last_admission
        return len(self._queue) >= limits.waiting_served_ratio * num_running or waited > limits.max_waiting_steps

    def _fitting(self, sequence: Sequence, num_pages_owed: int) -> Start | None:
        """Where the sequence starts from if the pages for it are there."""
        limits, num_free = self._limits, self._memory.pool.num_free - num_pages_owed
        reserve = 0
        if self._running:
            free_then, plan_then = sequence.not_fitting
            if num_free <= free_then and self._num_plans < plan_then + PLANS_BETWEEN_TRIES:
                return None
            reserve = int(limits.admission_watermark * limits.num_kv_pages)
        start = self._memory.start_of(sequence)
        needed = start.num_free_needed
        if limits.reservation == "guaranteed":
            reserve = self._promised
            needed += limits.num_pages(sequence.max_total_tokens) - len(sequence.token_ids) // limits.page_size - 1
        if needed + reserve <= num_free:
            return start
        sequence.not_fitting = num_free, self._num_plans
        return None

    def _admit(self, sequence: Sequence, start: Start) -> None:
        self._roster.admit(sequence, start)
        self._last_admission = self._num_plans
        if self._limits.reservation == "guaranteed":
            self._promised += self._memory.pages_to_come(sequence)
