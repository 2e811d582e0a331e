"""Commit: what the tokens of a step mean for its sequences."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from jaxcb.request import FinishReason
from jaxcb.scheduler.memory import SequenceMemory
from jaxcb.scheduler.plan import PlanRow, Row, Sampled, StepTokens, TokenEvent
from jaxcb.scheduler.roster import Roster
from jaxcb.scheduler.rows import without
from jaxcb.scheduler.sequence import Sequence, Status


class Commit:
    """Of one step, a part at a time; ``tokens`` is what came of it so far.

    A row may be late. If its sequence has ended since the step was planned, the token is discarded. If it has given its
    pages back, the token counts, and its KV is gone.
    """

    def __init__(self, step: int, memory: SequenceMemory, roster: Roster):
        self._step, self._memory, self._roster = step, memory, roster
        self.tokens = StepTokens([], [], {})

    def decodes(self, sequences: list[Sequence], token_ids: list[int]) -> None:
        """A token for each. Most of the time there is nothing to it, so it is one short loop."""
        if self._memory.last_given_back >= self._step:
            finished = Status.FINISHED
            late = [index for index, sequence in enumerate(sequences) if sequence.status is finished]
            sequences, token_ids = without(sequences, late), without(token_ids, late)
        tokens, look_at, first = self.tokens, [], len(self.tokens)
        tokens.sequences += sequences
        tokens.token_ids += token_ids
        for index, sequence in enumerate(sequences):
            token_id, so_far = token_ids[index], sequence.token_ids
            so_far.append(token_id)
            if len(so_far) >= sequence.look_at or token_id in sequence.end_ids:
                look_at.append(index)
        for index in look_at:
            sequence = sequences[index]
            if sequence.valid_from <= self._step:
                self._memory.settle(sequence)
            if token_ids[index] in sequence.end_ids or len(sequence.token_ids) >= sequence.max_total_tokens:
                self._end(first + index)

    def foreseen(self, rows: Iterable[PlanRow]) -> None:
        """Known tokens that some decodes have computed beside the one in flight. They come before what was sampled."""
        for row in rows:
            if row.num_tokens > 1 and row.sequence.status is not Status.FINISHED:
                known = row.token_ids[1:]
                row.sequence.token_ids += known
                self.tokens.sequences += [row.sequence] * len(known)
                self.tokens.token_ids += known

    def verified(self, rows: Seq[Row], sampled: Iterable[Sampled]) -> None:
        """Decodes some of which have drafts, with those that were accepted and the token after them.

        KV of rejected guesses is written over by what comes next.
        """
        counters = self._roster.counters
        for row, token_ids in zip(rows, sampled, strict=True):
            sequence = row.sequence
            many = [token_ids] if isinstance(token_ids, int) else token_ids
            counters.draft_tokens += row.num_drafts
            counters.draft_tokens_accepted += len(many) - 1
            for token_id in many:
                if sequence.status is not Status.FINISHED:
                    self._append(sequence, token_id)
            if sequence.valid_from <= self._step:
                sequence.num_scheduled = len(sequence.token_ids) - 1
                self._memory.settle(sequence)

    def chunks(self, rows: Seq[PlanRow], token_ids: Iterable[Sampled]) -> None:
        """Parts of prompts; one that reaches its end brings the first token."""
        for row, token_id in zip(rows, token_ids, strict=True):
            sequence = row.sequence
            if sequence.status is Status.FINISHED:
                continue
            if sequence.valid_from <= self._step:
                sequence.num_prefilled = row.context_len
                self._memory.settle(sequence)
                if sequence.followers and sequence.num_prefilled >= sequence.num_prompt_tokens:
                    self._roster.let_followers_go(sequence)
            if row.samples:
                assert isinstance(token_id, int)
                self._append(sequence, token_id)

    def _append(self, sequence: Sequence, token_id: int) -> None:
        sequence.token_ids.append(token_id)
        self.tokens.sequences.append(sequence)
        self.tokens.token_ids.append(token_id)
        self._end(len(self.tokens) - 1)

    def _end(self, index: int) -> None:
        """End a sequence if its newest token, the one at ``index``, is an end token, or the last that fits."""
        event = ending(self.tokens.sequences[index], self.tokens.token_ids[index])
        if event is not None and event.finish_reason is not None:
            self.tokens.endings[index] = event
            self._roster.retire(event.sequence, event.finish_reason)


def ending(sequence: Sequence, token_id: int) -> TokenEvent | None:
    """The event of a sequence's newest token if the sequence ends with it."""
    sampling = sequence.request.sampling
    if token_id in sequence.end_ids and sequence.num_generated > sampling.min_tokens:
        stop_id = token_id if token_id in sampling.stop_token_ids else None
        return TokenEvent(sequence, token_id, FinishReason.STOP, stop_id)
    if len(sequence.token_ids) >= sequence.max_total_tokens:
        return TokenEvent(sequence, token_id, FinishReason.LENGTH)
    return None
