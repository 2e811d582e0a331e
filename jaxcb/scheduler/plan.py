"""StepPlan: what one step computes, and TokenEvent: what came of it. Plain data, no jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Array

from jaxcb.paging import PageMoves
from jaxcb.request import FinishReason
from jaxcb.scheduler.sequence import Sequence

IN_FLIGHT = -1
"""Token id of "what this slot sampled last step": the host doesn't know it yet, the device does."""

Sampled = int | list[int]
"""What a row sampled: a token, or with drafts the accepted ones and the token after them."""


@dataclasses.dataclass(slots=True)
class PlanRow:
    """Positions ``start .. start + len(token_ids)`` of one sequence.

    A worked example, page_size 2. Sequence a decodes, b is given a chunk of three tokens, the last of its prompt:

        row  token_ids      start  samples  new_pages (from first_new_page on)
        a    (IN_FLIGHT,)   7      yes      () (position 7 lies in its fourth page, which it has)
        b    [11, 12, 13]   4      yes      [8, 2] (from 2 on)
    """

    sequence: Sequence
    generation: int
    """The sequence's generation when the row was planned."""
    slot: int
    token_ids: Array[int]
    start: int
    samples: bool
    """The row reaches the sequence's last token, so the step samples the next one."""
    first_new_page: int = 0
    new_pages: Array[int] = ()
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


@dataclasses.dataclass(slots=True)
class StepPlan:
    """One step: decodes first, then chunks. ``rows`` is never empty."""

    step: int
    rows: list[PlanRow]
    num_tokens: int
    num_decodes: int
    """Rows that continue an answer by one token, or by one and its drafts. Chunks follow."""
    num_drafts: int = 0
    moves: PageMoves | None = None
    """Copies of pages that the device makes before the step."""

    @property
    def decode_only(self) -> bool:
        """Every row has one token."""
        return self.num_decodes == len(self.rows) and not self.num_drafts


@dataclasses.dataclass(slots=True)
class TokenEvent:
    """A committed token, or the end of a sequence without one (``token_id`` None)."""

    sequence: Sequence
    token_id: int | None
    finish_reason: FinishReason | None = None
    stop_id: int | None = None
    """The id that ended the sequence, if it was one of the request's ``stop_token_ids``."""
