"""Preemption: who gives way when pages are short, and what becomes of its KV."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from jaxcb.scheduler.knobs import SchedulerLimits
from jaxcb.scheduler.memory import SequenceMemory
from jaxcb.scheduler.policy import Policy
from jaxcb.scheduler.sequence import Sequence
from jaxcb.scheduler.step_time import StepTimeFit


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


def should_swap(sequence: Sequence, limits: SchedulerLimits, memory: SequenceMemory, fit: StepTimeFit) -> bool:
    """Whether the victim's KV moves to host memory, rather than being computed again.

    "auto" compares moving its pages there and back with what its tokens add to later steps.
    """
    if limits.preemption == "recompute":
        return False
    num_pages = limits.num_pages(sequence.num_scheduled) - sequence.num_behind_window
    if num_pages > memory.host.num_free:
        return False
    return limits.preemption == "swap" or (
        fit.fitted and 2 * num_pages * limits.host_page_s < sequence.num_scheduled * fit.token_s
    )
