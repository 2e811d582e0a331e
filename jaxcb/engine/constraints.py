"""Constraints: the grammars of running requests beside the steps: what is told to them, and what they say to it."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from jaxcb.grammar import Constraint, Grammar, Masks
from jaxcb.request import FinishReason
from jaxcb.scheduler import Scheduler, StepPlan, TokenEvent
from jaxcb.scheduler.sequence import Sequence, Status
from jaxcb.step.orders import RowMasks


class Constraints:
    """Those of one engine; its thread calls it.

    The forward of a step needs no mask, its sampler does. So a constrained sequence runs ahead like any other, and only
    the sampler waits: until the step before has committed and its masks are filled, which the host does while the
    forward runs.
    """

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler
        self._of: dict[Sequence, Constraint] = {}
        self._masks: Masks | None = None

    def open(self, sequence: Sequence, grammar: Grammar) -> None:
        """Hold a new sequence to a grammar."""
        if self._masks is None:
            self._masks = Masks(grammar.mask_size)
        sampling = sequence.request.sampling
        constraint = grammar.constraint(
            sequence.end_ids,
            # What looks at every sampled token must see every token sampled.
            takes_forced=sampling.logprobs is None
            and not sampling.controlled
            and all(state is None for state in sequence.request.processor_states),
        )
        self._of[sequence] = constraint
        if foreseen := constraint.foreseen:
            self._scheduler.foresee(sequence, foreseen)

    def in_step(self, plan: StepPlan) -> list[tuple[int, Constraint, int]]:
        """(row, constraint, position in the answer) of what a step samples under a grammar."""
        known = self._of
        if not known:
            return []
        rows = [
            (index, constraint, start + 1 - sequence.num_prompt_tokens)
            for index, (sequence, start) in enumerate(zip(plan.decoding, plan.starts, strict=True))
            if (constraint := known.get(sequence)) is not None
        ]
        for at, (index, constraint, position) in enumerate(rows):
            if (row := plan.others.get(index)) is not None:
                rows[at] = index, constraint, position + row.num_tokens - 1
        return rows + [
            (index, constraint, row.context_len - row.sequence.num_prompt_tokens)
            for index, row in enumerate(plan.chunks, plan.num_decodes)
            if row.samples and (constraint := known.get(row.sequence)) is not None
        ]

    def masks(self, rows: Seq[tuple[int, Constraint, int]], vocab_size: int) -> RowMasks:
        """Masks of a step's constrained rows. All steps before it have committed."""
        assert self._masks is not None, "a constraint was opened"
        live = set(self._of.values())  # those of sequences that have not ended in these commits
        held = [row for row in rows if row[1] in live]
        filled = self._masks.fill([(constraint, position) for _, constraint, position in held], vocab_size)
        return RowMasks([index for index, _, _ in held], filled)

    def permit(self, sequence: Sequence, token_id: int) -> bool:
        """Its grammar, if it has one, lets the token come next."""
        constraint = self._of.get(sequence)
        return constraint is None or constraint.permits(token_id)

    def learn(self, events: Iterable[TokenEvent]) -> list[TokenEvent]:
        """Take the tokens of a committed step. Returns the ends of those whose answer has to end here."""
        if not self._of:
            return []
        changed: dict[Sequence, Constraint] = {}
        for event in events:
            constraint = self._of.get(event.sequence)
            if constraint is not None and event.token_id is not None and event.finish_reason is None:
                constraint.advance([event.token_id])
                changed[event.sequence] = constraint
            elif event.finish_reason is not None:
                self.drop(event.sequence)
        endings = []
        for sequence, constraint in changed.items():
            if sequence.status is Status.FINISHED:
                continue
            if constraint.error is not None:
                endings.append(self._end(sequence, FinishReason.ERROR, f"the grammar failed: {constraint.error}"))
            elif constraint.ended:
                endings.append(self._end(sequence, FinishReason.STOP))
            else:
                self._scheduler.foresee(sequence, constraint.foreseen)
        return endings

    def nothing_left(self, sequence: Sequence) -> TokenEvent:
        """End a sequence that could sample no token at all."""
        constraint = self._of.get(sequence)
        if constraint is not None and constraint.error is None and constraint.complete:
            return self._end(sequence, FinishReason.STOP)
        why = "its parameters leave none, or the model's logits are not numbers"
        if constraint is not None:
            why = constraint.error or "its grammar and its other parameters leave none"
        return self._end(sequence, FinishReason.ERROR, f"no token could be sampled: {why}")

    def drop(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._of.pop(sequence, None)

    def _end(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> TokenEvent:
        self._scheduler.finish(sequence.request.request_id, reason)
        self.drop(sequence)
        return TokenEvent(sequence, None, reason, error=error)
