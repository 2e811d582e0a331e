"""Constraint: how far an answer has come in its grammar, and the ids that may follow. Masks: those of a whole step."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import llguidance
import llguidance.numpy
import numpy as np
from jaxtyping import Int

from jaxcb.grammar.marker import Marker

THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
"""That fill masks beside the forward."""


class Constraint:
    """One answer's. ``position`` counts the tokens of the answer that it was told of.

    Tokens that the grammar forces stand in ``forced``: they come next, whatever the model thinks, and the matcher has
    consumed them already. End tokens are ours to judge: they may come only where the answer is complete.

    Arguments:
        matcher: at the grammar's beginning.
        end_ids: ids that end this answer.
        eos_ids: the model's end tokens, which may not come up inside of an answer, whether or not they end it.
        marker: the answer begins with free text up to it.
        takes_forced: look for forced tokens. Otherwise they are sampled one by one, from masks that may allow a few
            ways to write them.
    """

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        *,
        end_ids: Iterable[int] = (),
        eos_ids: Iterable[int] = (),
        marker: Marker | None = None,
        takes_forced: bool = True,
    ):
        self._matcher, self._marker = matcher, marker
        self._end_ids = sorted(end_ids)
        self._never = sorted({*self._end_ids, *eos_ids})
        self._free = marker is not None
        self._marker_state = 0
        self._takes_forced = takes_forced
        self.position = 0
        self.forced: list[int] = []
        self._look_ahead()

    @property
    def error(self) -> str | None:
        """Why no mask can be had any more, or None."""
        return self._matcher.get_error() if self._matcher.is_error() else None

    @property
    def complete(self) -> bool:
        """The answer so far may end here."""
        return not self._free and not self.forced and self._matcher.is_accepting()

    @property
    def ended(self) -> bool:
        """It has to: nothing may follow."""
        return not self._free and not self.forced and self.error is None and self._matcher.is_stopped()

    def permits(self, token_id: int) -> bool:
        """The token may come next."""
        if self.forced:
            return token_id == self.forced[0]
        if self._free:
            return True
        if token_id in self._never:
            return token_id in self._end_ids and self.complete
        return self._matcher.validate_tokens([token_id]) == 1

    def advance(self, token_ids: Sequence[int]) -> None:
        """Learn the next tokens of the answer."""
        for token in token_ids:
            self.position += 1
            if self.forced:
                assert token == self.forced[0], "a forced token was replaced"
                del self.forced[0]
            elif self._free:
                assert self._marker is not None
                self._marker_state = self._marker.after(self._marker_state, token)
                self._free = self._marker_state < len(self._marker.text)
            else:
                self._matcher.consume_token(token)
            if not self.forced:
                self._look_ahead()

    def _look_ahead(self) -> None:
        if self._free or not self._takes_forced or self._matcher.is_error():
            return
        tokens = self._matcher.compute_ff_tokens()
        ends = [index for index, token in enumerate(tokens) if token in self._never]
        self.forced = tokens[: ends[0]] if ends else tokens
        if self.forced:
            self._matcher.consume_tokens(self.forced)

    @property
    def foreseen(self) -> list[int]:
        """Forced tokens after which another one comes: the answer's last token is sampled, so that nothing has to be
        sampled after it."""
        return self.forced[:-1] if self.forced and self._matcher.is_stopped() else list(self.forced)

    def next_forced(self, position: int) -> int | None:
        """The token of the answer at ``position`` if it is known already."""
        ahead = position - self.position
        return self.forced[ahead] if ahead < len(self.forced) else None

    @property
    def matcher(self) -> llguidance.LLMatcher | None:
        """Whose mask counts; None in free text."""
        return None if self._free else self._matcher

    def finish_row(self, row: Int[np.ndarray, "W"]) -> None:
        """Complete a row that the matcher has filled, or in free text one of ones."""
        if self._free:
            assert self._marker is not None
            _clear(row, self._marker.overshooting(self._marker_state))
        _clear(row, self._never)
        if not self._free and self._matcher.is_accepting():
            _set(row, self._end_ids)


class Masks:
    """Fills masks of what may be sampled: int32 [C, W], bit i of word w is id 32 w + i, 1 where it may.

    ``mask_size`` is that of the grammars (:class:`jaxcb.grammar.Grammar`).
    """

    def __init__(self, mask_size: int):
        self._executor = llguidance.LLExecutor(num_threads=THREADS)
        self._num_words = -(-mask_size // 32)

    def fill(self, answers: Sequence[tuple[Constraint, int]], vocab_size: int) -> Int[np.ndarray, "C W"]:
        """A mask for each answer, of the model's ``vocab_size`` ids.

        ``answers``: constraint, and the position in the answer of the token that is sampled. An answer whose constraint
        fails may go on with anything: look at its ``error``.
        """
        mask = np.full((len(answers), self._num_words), -1, np.int32)
        filled = []
        for index, (constraint, position) in enumerate(answers):
            if (token := constraint.next_forced(position)) is not None:
                mask[index] = 0
                _set(mask[index], [token])
            elif constraint.error is None:
                filled.append((index, constraint))
        wanted = [(constraint.matcher, index) for index, constraint in filled if constraint.matcher is not None]
        if wanted:
            llguidance.numpy.fill_next_token_bitmask_par(self._executor, wanted, mask)
        for index, constraint in filled:
            if constraint.error is None:
                constraint.finish_row(mask[index])
            else:
                mask[index] = -1
        return np.ascontiguousarray(mask[:, : -(-vocab_size // 32)])  # a tokenizer may know more ids than the model


def _set(row: Int[np.ndarray, "W"], ids: Iterable[int]) -> None:
    words = row.view(np.uint32)
    for token in ids:
        words[token >> 5] |= np.uint32(1 << (token & 31))


def _clear(row: Int[np.ndarray, "W"], ids: Iterable[int]) -> None:
    words = row.view(np.uint32)
    for token in ids:
        words[token >> 5] &= np.uint32(0xFFFFFFFF ^ (1 << (token & 31)))
