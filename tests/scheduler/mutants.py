"""Seventeen bugs that schedulers have had, each as a change to ours: tests of the tests. See ``test_mutants.py``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from unittest import mock

from jaxcb.paging import PagePool, PrefixCache
from jaxcb.paging.host import HostPool
from jaxcb.scheduler.admission import Admission
from jaxcb.scheduler.commit import Commit
from jaxcb.scheduler.memory import SequenceMemory
from jaxcb.scheduler.queue import WaitingQueue
from jaxcb.scheduler.roster import Roster
from jaxcb.scheduler.rows import take_positions

Mutant = Callable[[], AbstractContextManager]


def _replaced(owner: type, name: str, change: Callable[..., object]) -> AbstractContextManager:
    """Patch a method; ``change`` takes the original before its arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def changed(*args, **kwargs):
        return change(original, *args, **kwargs)

    return mock.patch.object(owner, name, changed)


def off_by_one_at_a_page_edge():
    """A sequence takes its next page one position late."""

    def late(original, self, sequence, start):
        original(self, sequence, start)
        sequence.pause_at = min(sequence.capacity + 1, sequence.max_total_tokens - 1)

    return _replaced(SequenceMemory, "admit", late)


def pages_freed_before_the_commit():
    """Pages of a step in flight are given to others at once."""

    def at_once(original, self, sequence):
        planned, self.last_planned = self.last_planned, self.last_committed
        original(self, sequence)
        self.last_planned = planned
        sequence.last_step, sequence.valid_from = planned, planned + 1

    return _replaced(SequenceMemory, "give_back", at_once)


def prefixes_known_without_their_parent():
    """The key of a page is its own tokens alone."""

    class Loose(dict):
        def get(self, key, default=None):
            return super().get(key[1], default)

        def __getitem__(self, key):
            return super().__getitem__(key[1])

        def __setitem__(self, key, value):
            super().__setitem__(key[1], value)

        def __delitem__(self, key):
            super().__delitem__(key[1])

    def loose(original, self, *args, **kwargs):
        original(self, *args, **kwargs)
        self._page_of = Loose()

    return _replaced(PrefixCache, "__init__", loose)


def a_salt_that_is_ignored():
    return mock.patch.object(PrefixCache, "root", lambda self, salt="": (self._epoch, ""))


def pages_registered_before_they_are_computed():
    """A prompt's pages are known as soon as it is admitted."""

    def early(original, self, sequence, start):
        original(self, sequence, start)
        if self.cache.enabled:
            computed, sequence.num_prefilled = sequence.num_prefilled, len(sequence.token_ids)
            self._register_pages(sequence, sequence.num_computed // self.limits.page_size)
            sequence.num_prefilled = computed

    return _replaced(SequenceMemory, "admit", early)


def a_match_of_the_whole_prompt():
    """A prefix hit leaves nothing to compute."""

    def whole(original, self, root, tokens, max_tokens, **kwargs):
        return original(self, root, tokens, max_tokens + 1, **kwargs)

    return _replaced(PrefixCache, "match", whole)


def a_late_token_counted_for_the_new_life():
    """A step planned before a preemption moves the counters of the sequence after it."""

    def late(original, self, sequence):
        original(self, sequence)
        sequence.valid_from = 0

    return _replaced(SequenceMemory, "give_back", late)


def a_partial_page_shared_instead_of_copied():
    """A fork writes into its parent's page."""

    def share(original, self, sequence, start):
        if start.copy_of:
            self.pool.retain(start.copy_of)
        original(self, sequence, start)
        if start.copy_of:
            index = start.num_computed // self.limits.page_size
            self.pool.release([sequence.pages[index]])
            sequence.pages[index] = start.copy_of

    return _replaced(SequenceMemory, "admit", share)


def a_host_page_given_out_while_it_is_still_to_be_read():
    def at_once(original, self, pages):
        original(self, pages)
        self.settle()

    return _replaced(HostPool, "free", at_once)


def a_window_one_page_too_narrow():
    """Pages behind the window go back too early, and another's tokens are read."""

    def narrow(original, self, sequence, window):
        return original(self, sequence, window - self.limits.page_size)

    return _replaced(SequenceMemory, "_return_behind_window", narrow)


def a_reference_dropped_on_a_shared_page():
    def forget(original, self, page):
        if self.refcount(page) == 0:
            original(self, page)

    return _replaced(PagePool, "retain", forget)


def newcomers_before_the_preempted():
    """A preempted sequence goes to the end of the queue."""

    def at_the_end(original, self, sequence):
        sequence.ticket += 1_000_000
        self.add(sequence)

    return _replaced(WaitingQueue, "requeue", at_the_end)


def prompts_before_decodes():
    """A prompt that was started takes the step for itself."""

    def greedy(original, self):
        decodes, prompts = original(self)
        return (decodes[:0], prompts) if prompts else (decodes, prompts)

    return _replaced(Roster, "sorted_running", greedy)


def an_admission_that_takes_the_pages_of_decodes():
    def careless(original, self, sequence, num_pages_owed):
        free, self._memory.pool.num_free = self._memory.pool.num_free, self._memory.pool.num_free + 1
        start = original(self, sequence, num_pages_owed)
        self._memory.pool.num_free = free
        return start

    return _replaced(Admission, "_fitting", careless)


def a_new_page_told_to_the_wrong_row():
    """The page of one sequence goes into the block table of the one beside it."""

    def shifted(sequences, budget, memory):
        decodes = take_positions(sequences, budget, memory)
        count = len(decodes.sequences)
        decodes.others = {(index + 1) % count: row for index, row in decodes.others.items()}
        return decodes

    return mock.patch("jaxcb.scheduler.scheduler.take_positions", shifted)


def a_position_taken_by_one_that_sits_out():
    """A sequence that is left out of a step for want of a page is thought to be in it."""

    def careless(sequences, budget, memory):
        decodes = take_positions(sequences, budget, memory)
        for sequence in set(sequences).difference(decodes.sequences):
            sequence.num_scheduled += 1
        return decodes

    return mock.patch("jaxcb.scheduler.scheduler.take_positions", careless)


def a_token_for_one_that_has_ended():
    """A decode whose sequence ended while its step ran still counts."""

    def counted(original, self, sequences, token_ids):
        self._memory.last_given_back, kept = -1, self._memory.last_given_back
        original(self, sequences, token_ids)
        self._memory.last_given_back = max(kept, self._memory.last_given_back)

    return _replaced(Commit, "decodes", counted)


MUTANTS: tuple[Mutant, ...] = (
    off_by_one_at_a_page_edge,
    pages_freed_before_the_commit,
    prefixes_known_without_their_parent,
    a_salt_that_is_ignored,
    pages_registered_before_they_are_computed,
    a_match_of_the_whole_prompt,
    a_late_token_counted_for_the_new_life,
    a_partial_page_shared_instead_of_copied,
    a_host_page_given_out_while_it_is_still_to_be_read,
    a_window_one_page_too_narrow,
    a_reference_dropped_on_a_shared_page,
    newcomers_before_the_preempted,
    prompts_before_decodes,
    an_admission_that_takes_the_pages_of_decodes,
    a_new_page_told_to_the_wrong_row,
    a_position_taken_by_one_that_sits_out,
    a_token_for_one_that_has_ended,
)
