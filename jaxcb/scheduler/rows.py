"""Rows of a plan: of sequences that decode, of their drafts, and of chunks."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Array

from jaxcb.scheduler.chunks import Chunk
from jaxcb.scheduler.memory import SequenceMemory
from jaxcb.scheduler.plan import IN_FLIGHT, DecodeRow, PlanRow, Row
from jaxcb.scheduler.sequence import Sequence

Drafter = Callable[[Sequence, int], Array[int]]
"""Guesses at most so many next tokens of a sequence, from its ``token_ids``."""

_new = tuple.__new__  # of a named tuple: half the time of its own constructor


def decode_rows(decodes: list[Sequence], budget: int, memory: SequenceMemory) -> list[Row]:
    """A row of one token for each. One that needs a page is left out while none is free.

    This runs for every token that is generated: no call, no property, no allocation but the row.
    """
    rows: list[Row] = []
    for sequence in decodes:
        start = sequence.num_scheduled
        if start < sequence.pause_at:
            rows.append(_new(DecodeRow, (sequence, sequence.slot, start)))
        elif start == sequence.capacity and memory.pool.num_free and start < sequence.max_total_tokens - 1:
            first, pages = len(sequence.pages), memory.grow(sequence)
            rows.append(PlanRow(sequence, sequence.slot, (IN_FLIGHT,), start, True, first, pages))
        else:
            continue
        sequence.num_scheduled = start + 1
        budget -= 1
        if not budget:
            break
    return rows


def add_drafts(rows: list[Row], drafter: Drafter, num_draft_tokens: int, budget: int, memory: SequenceMemory) -> int:
    """Extend decodes by guesses, where budget and pages are left by everything else. Returns how many."""
    left = budget
    for i, row in enumerate(rows):
        sequence = row.sequence
        room = sequence.max_total_tokens - len(sequence.token_ids) - 1
        most = min(num_draft_tokens, left, room)
        drafts = list(drafter(sequence, most))[:most] if most > 0 else []
        if not drafts:
            continue
        first, pages = row.first_new_page or len(sequence.pages), list(row.new_pages)
        while sequence.capacity < row.start + 1 + len(drafts) and memory.pool.num_free:
            pages += memory.grow(sequence)
        drafts = drafts[: sequence.capacity - row.start - 1]
        tokens = [IN_FLIGHT, *drafts]
        rows[i] = PlanRow(sequence, row.slot, tokens, row.start, True, first, pages, num_drafts=len(drafts))
        left -= len(drafts)
    return budget - left


def chunk_row(chunk: Chunk) -> PlanRow:
    """From the last token on, the sequence decodes."""
    sequence, start = chunk.sequence, chunk.sequence.num_scheduled
    end = start + chunk.num_tokens
    samples = end == len(sequence.token_ids)
    row = PlanRow(sequence, sequence.slot, sequence.token_ids[start:end], start, samples)
    if chunk.is_new:
        row.new_pages = list(sequence.pages)  # the slot's table still holds its last owner's
    sequence.num_scheduled = end
    sequence.decoding = samples
    return row


def num_pages_needed(decodes: list[Sequence]) -> int:
    """Pages without which some decodes can't go on."""
    needed = 0
    for sequence in decodes:
        if sequence.num_scheduled == sequence.capacity and sequence.decoding:
            needed += sequence.capacity < sequence.max_total_tokens - 1
    return needed
