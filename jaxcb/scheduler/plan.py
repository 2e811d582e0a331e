"""StepPlan: what one step computes, and StepTokens: what came of it. Plain data, no jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float

from jaxcb.logprobs import Logprobs
from jaxcb.paging import PageMoves
from jaxcb.request import FinishReason
from jaxcb.scheduler.sequence import Sequence

IN_FLIGHT = -1
"""Token id of "what this slot sampled last step": the host doesn't know it yet, the device does."""

_NEXT = (IN_FLIGHT,)  # tuples of integers cost the garbage collector nothing, lists do

Sampled = int | list[int]
"""What a row sampled: a token, or with drafts the accepted ones and the token after them."""


@dataclasses.dataclass(slots=True)
class PlanRow:
    """Positions ``start .. start + len(token_ids)`` of one sequence.

    A worked example, page_size 2. Sequence a decodes, b is given a chunk of three tokens, the last of its prompt:

        row  token_ids      start  samples  new_pages (from first_new_page on)
        a    (IN_FLIGHT,)   7      yes      () (position 7 lies in its fourth page, which it has)
        b    [11, 12, 13]   4      yes      [8, 2] (from 2 on)

    Were it foreseen that a's token in flight is followed by 5 and 6, its row would be [IN_FLIGHT, 5, 6].
    """

    sequence: Sequence
    slot: int
    token_ids: Seq[int]
    start: int
    samples: bool
    """The row reaches the sequence's last token, so the step samples the next one."""
    first_new_page: int = 0
    new_pages: Seq[int] = ()
    """Pages that the device's block table must learn, at index ``first_new_page`` and on."""
    num_drafts: int = 0
    """The last so many of ``token_ids`` are guesses. The step samples after each of them and after the token before,
    and keeps the guesses that agree (Leviathan et al. 2023)."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def context_len(self) -> int:
        """Tokens whose KV the row's last token attends to, itself included."""
        return self.start + len(self.token_ids)


class _Decode(NamedTuple):
    sequence: Sequence
    slot: int
    start: int


class DecodeRow(_Decode):
    """The usual PlanRow, of a sequence that goes on from the token in its slot and has the page for it. There is one
    for every token that is generated, so it holds only what differs."""

    __slots__ = ()
    token_ids: ClassVar[Seq[int]] = _NEXT
    num_tokens: ClassVar[int] = 1
    samples: ClassVar[bool] = True
    first_new_page: ClassVar[int] = 0
    new_pages: ClassVar[Seq[int]] = ()
    num_drafts: ClassVar[int] = 0

    @property
    def context_len(self) -> int:
        return self.start + 1


Row = PlanRow | DecodeRow


@dataclasses.dataclass(slots=True)
class StepPlan:
    """One step: decodes first, then chunks; never empty.

    What decodes have in common stands in columns, since there are many of them and each is in every step; ``rows`` are
    made of them when somebody asks.
    """

    step: int
    decoding: list[Sequence]
    """Sequences that continue their answer by one token, or by one and its drafts."""
    slots: Seq[int]
    """Of ``decoding``."""
    starts: Seq[int]
    """Of ``decoding``: the position that is computed."""
    others: Mapping[int, PlanRow]
    """Rows of ``decoding`` with more to say than that (a new page, drafts), by index."""
    chunks: Seq[PlanRow]
    num_tokens: int
    num_drafts: int = 0
    num_foreseen: int = 0
    """Tokens of answers in ``others`` that are known and not sampled."""
    moves: PageMoves | None = None
    """Copies of pages that the device makes before the step."""
    _rows: list[Row] | None = None

    @classmethod
    def of(cls, rows: Seq[PlanRow], num_decodes: int, *, step: int = 0) -> StepPlan:
        """A plan made by hand; the first ``num_decodes`` rows are decodes."""
        decodes = rows[:num_decodes]
        return cls(
            step,
            [row.sequence for row in decodes],
            [row.slot for row in decodes],
            [row.start for row in decodes],
            dict(enumerate(decodes)),
            rows[num_decodes:],
            sum(row.num_tokens for row in rows),
            sum(row.num_drafts for row in rows),
        )

    @property
    def num_decodes(self) -> int:
        return len(self.decoding)

    @property
    def num_rows(self) -> int:
        return len(self.decoding) + len(self.chunks)

    @property
    def decode_only(self) -> bool:
        """Every row has one token."""
        return not self.chunks and not self.num_drafts and not self.num_foreseen

    @property
    def rows(self) -> list[Row]:
        """Those of ``decoding``, then ``chunks``."""
        if self._rows is None:
            self._rows = [*map(DecodeRow, self.decoding, self.slots, self.starts), *self.chunks]
            for index, row in self.others.items():
                self._rows[index] = row
        return self._rows


class TokenEvent(NamedTuple):
    """A committed token, or the end of a sequence without one (``token_id`` None)."""

    sequence: Sequence
    token_id: int | None
    finish_reason: FinishReason | None = None
    stop_id: int | None = None
    """The id that ended the sequence, if it was one of the request's ``stop_token_ids``."""
    logprobs: Logprobs | None = None
    """Of this token, if the request asks for them; the engine's core adds them."""
    prompt_logprobs: Logprobs | None = None
    """Of the prompt from its second token on, with the first token."""
    embedding: Float[np.ndarray, "E"] | None = None
    """Of the prompt, with the first token."""
    error: str | None = None
    """Why the sequence failed, with ``FinishReason.ERROR``."""


@dataclasses.dataclass(slots=True)
class StepTokens:
    """The tokens of a committed step, in columns for the same reason as in StepPlan; iterating makes the events."""

    sequences: list[Sequence]
    token_ids: list[int]
    endings: dict[int, TokenEvent]
    """Tokens that end their sequence, by index."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def __iter__(self) -> Iterator[TokenEvent]:
        events = [*map(TokenEvent, self.sequences, self.token_ids)]
        for index, event in self.endings.items():
            events[index] = event
        return iter(events)
