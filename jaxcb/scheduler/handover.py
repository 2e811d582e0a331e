"""Handover: sequences whose prompt another engine computes, until their first step here, and pages that others take.

Such a sequence is expected first: it has no pages, and no plan names it. When there is room for it, it is given the
pages and the slot that it will run with, so that nobody can take them while its KV is under way (DistServe, section
4.3: the decoding side pulls when it has room). With all of its KV there and its first token known it is adopted: it
runs from the next plan on, as one that comes back from host memory does. If the other engine fails meanwhile it is
taken over: it joins the queue and is computed here.

On the other engine, pages are lent as steps fill them: they stay owned until the decoding side has their content.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from jaxcb.request import FinishReason, Request
from jaxcb.scheduler.commit import ending
from jaxcb.scheduler.knobs import SchedulerLimits
from jaxcb.scheduler.memory import SequenceMemory
from jaxcb.scheduler.plan import TokenEvent
from jaxcb.scheduler.roster import Roster
from jaxcb.scheduler.sequence import Sequence, Status


class Handover:
    """Of one engine; its scheduler finds and ends expected sequences as it does others."""

    def __init__(self, limits: SchedulerLimits, memory: SequenceMemory, roster: Roster):
        self._limits, self._memory, self._roster = limits, memory, roster
        self.expected: dict[str, Sequence] = {}
        """By request id, those that wait for the first answer's prompt (n > 1) among them."""
        self._siblings: dict[Sequence, list[Sequence]] = {}

    def expect(self, requests: Seq[Request]) -> list[Sequence]:
        """Sequences of the answers to one prompt. The first is adopted, the others fork from it then.

        Raises:
            RequestError: an id is in use, or a policy of the user's fails. Nothing is kept of any.
        """
        sequences: list[Sequence] = []
        for request in requests:
            self._roster.check_id(request.request_id)
            sequences.append(self._roster.make(request, sequences[0] if sequences else None))
            self._roster.waiting.rank(sequences[-1])
        self.expected.update((sequence.request.request_id, sequence) for sequence in sequences)
        self._siblings[sequences[0]] = sequences[1:]
        return sequences

    def reserve(self, sequence: Sequence) -> int | None:
        """Pages and a slot for an expected sequence; None if there is no room for it now.

        Returns:
            Pages at its beginning that are known here already: their content needn't come.
        """
        limits, memory, roster = self._limits, self._memory, self._roster
        oldest = next(iter(roster.waiting), None)
        if (oldest is not None and oldest.admitted_once) or not memory.free_slots:
            return None  # one that was preempted goes first
        num_open = len(roster.running) + len(memory.reserved)
        match = memory.cache.match(
            memory.cache.root(sequence.salt), sequence.packed, sequence.num_prompt_tokens, on_device=True
        )
        num_new = memory.pages_at_start(sequence.num_prompt_tokens + 1) - len(match.pages)
        needed = num_new + memory.cache.num_to_take(match.pages)
        if limits.reservation == "guaranteed":
            others = [*roster.running.values(), *memory.reserved]
            needed += sum(map(memory.pages_to_come, others)) + limits.num_pages(sequence.max_total_tokens)
            needed -= num_new + len(match.pages)
        if not has_room(limits, num_open=num_open, num_free_pages=memory.pool.num_free, num_pages=needed):
            return None
        memory.reserve(sequence, match, num_new)
        return len(match.pages)

    def first_token(self, sequence: Sequence, token_id: int, num_cached_tokens: int) -> TokenEvent:
        """Learn the first token of an expected sequence, whose KV may still be under way. It may end with it.

        Arguments:
            num_cached_tokens: tokens of the prompt that the other engine didn't have to compute.
        """
        sequence.token_ids.append(token_id)
        sequence.num_cached_tokens = num_cached_tokens
        self._roster.counters.generated_tokens += 1
        event = ending(sequence, token_id)
        if event is None or event.finish_reason is None:
            return TokenEvent(sequence, token_id)
        self.finish(sequence, event.finish_reason)
        return event

    def adopt(self, sequence: Sequence) -> None:
        """All KV of the prompt is in the reserved pages, and the first token is known: the next plan takes it up."""
        siblings = self._forget(sequence)
        self._memory.seat(sequence)
        self._roster.adopt(sequence)
        self._queue(siblings, sequence)

    def take_over(self, sequence: Sequence) -> None:
        """The other engine fails: what is known of the sequence's tokens is computed here."""
        siblings = self._forget(sequence)
        if sequence.slot >= 0:
            self._memory.release_reserved(sequence)
        self._roster.waiting.add(sequence)
        self._queue(siblings, sequence)

    def take_over_all(self) -> None:
        """KV that is under way counts no more."""
        for sequence in list(self._siblings):
            self.take_over(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """An expected sequence ends before it was adopted."""
        siblings = self._forget(sequence)
        if sequence.slot >= 0:
            self._memory.release_reserved(sequence)
        sequence.status, sequence.finish_reason, sequence.parent = Status.FINISHED, reason, None
        for other in siblings:  # nobody computes their prompt for them now
            other.parent = None
        self._queue(siblings, None)

    def lend(self, request_id: str, pages: Seq[int]) -> None:
        """Hold on to pages of a running sequence until another engine has their content: :meth:`returned`."""
        self._memory.lend(request_id, pages)

    def returned(self, request_id: str) -> None:
        """What was lent for a request, if anything, is held no more."""
        self._memory.returned(request_id)

    @property
    def waits_for_others(self) -> bool:
        """Pages or seats are held for other engines: what finds no room gets it when they have moved on."""
        return bool(self._memory.reserved or self._memory.lent)

    def check(self) -> None:
        """Raise AssertionError unless what is reserved belongs to those that are expected."""
        reserved = {sequence for sequence in self.expected.values() if sequence.slot >= 0}
        assert reserved == self._memory.reserved.keys()
        for sequence in reserved:
            assert sequence.status is Status.WAITING and self._roster.find(sequence.request.request_id) is None

    def _forget(self, sequence: Sequence) -> list[Sequence]:
        """It is expected no more; its siblings that still are."""
        del self.expected[sequence.request.request_id]
        siblings = self._siblings.pop(sequence, [])
        return [other for other in siblings if other.status is Status.WAITING]

    def _queue(self, siblings: list[Sequence], leader: Sequence | None) -> None:
        """Siblings join the queue, held back while ``leader`` has yet to run."""
        for other in siblings:
            del self.expected[other.request.request_id]
            self._roster.waiting.add(other, held_back=leader is not None)
        if leader is not None:
            leader.followers = siblings


def has_room(limits: SchedulerLimits, *, num_open: int, num_free_pages: int, num_pages: int) -> bool:
    """Whether a decode engine may ask for the KV of one more sequence: a seat, and pages beside what admissions leave
    free for the growth of others. The simulator's decode pools go by it too.

    Arguments:
        num_open: sequences that run here or are under way.
        num_pages: free pages that this one takes.
    """
    spare = int(limits.admission_watermark * limits.num_kv_pages) if num_open else 0
    return num_open < limits.max_num_seqs and num_pages + spare <= num_free_pages
