"""Rows of a plan: of sequences that decode, of their drafts, and of chunks."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TypeVar

from jaxcb.scheduler.chunks import Chunk
from jaxcb.scheduler.memory import SequenceMemory
from jaxcb.scheduler.plan import IN_FLIGHT, PlanRow
from jaxcb.scheduler.sequence import Sequence

T = TypeVar("T")
Drafter = Callable[[Sequence, int], Seq[int]]
"""Guesses at most so many next tokens of a sequence, from its ``token_ids``."""


@dataclasses.dataclass(slots=True)
class Decodes:
    """The decodes of a step, in columns as :class:`StepPlan` has them."""

    sequences: list[Sequence]
    starts: list[int]
    others: dict[int, PlanRow]


def take_positions(sequences: list[Sequence], budget: int, memory: SequenceMemory) -> Decodes:
    """Take each a position further. One that needs a page is left out while none is free.

    This runs for every token that is generated: a few short loops over plain attributes, and whatever else is to be
    done, for the few sequences that stand at the end of a page.
    """
    starts = [sequence.num_scheduled for sequence in sequences]
    paused = [i for i, sequence in enumerate(sequences) if sequence.num_scheduled >= sequence.pause_at]
    others: dict[int, PlanRow] = {}
    if paused or len(sequences) > budget:
        growing = [i for i in paused if needs_page(sequences[i])][: memory.pool.num_free]
        left_out = sorted(set(paused).difference(growing))
        sequences = without(sequences, left_out)[:budget]
        starts = without(starts, left_out)[:budget]
        for i in [i - bisect_left(left_out, i) for i in growing]:
            if i >= budget:
                break
            sequence = sequences[i]
            first, pages = len(sequence.pages), (memory.grow(sequence),)
            others[i] = PlanRow(sequence, sequence.slot, (IN_FLIGHT,), starts[i], True, first, pages)
    for sequence in sequences:
        sequence.num_scheduled += 1
    return Decodes(sequences, starts, others)


def without(items: list[T], indices: list[int]) -> list[T]:
    """The list without what stands at some ascending indices; a few, so that deleting is cheaper than choosing."""
    rest = items.copy()
    for index in reversed(indices):
        del rest[index]
    return rest


def needs_page(sequence: Sequence) -> bool:
    """Whether a decoding sequence can't go on without another page."""
    at = sequence.num_scheduled
    return at == sequence.capacity and at < sequence.max_total_tokens - 1


def add_drafts(decodes: Decodes, drafter: Drafter, num_draft_tokens: int, budget: int, memory: SequenceMemory) -> int:
    """Extend decodes by guesses, where budget and pages are left by everything else. Returns how many."""
    left = budget
    for i, (sequence, start) in enumerate(zip(decodes.sequences, decodes.starts, strict=True)):
        room = sequence.max_total_tokens - len(sequence.token_ids) - 1
        most = min(num_draft_tokens, left, room)
        drafts = list(drafter(sequence, most))[:most] if most > 0 else []
        if not drafts:
            continue
        row = decodes.others.get(i)
        first, pages = (row.first_new_page, list(row.new_pages)) if row else (len(sequence.pages), [])
        while sequence.capacity < start + 1 + len(drafts) and memory.pool.num_free:
            pages.append(memory.grow(sequence))
        drafts = drafts[: sequence.capacity - start - 1]
        tokens = [IN_FLIGHT, *drafts]
        decodes.others[i] = PlanRow(sequence, sequence.slot, tokens, start, True, first, pages, num_drafts=len(drafts))
        left -= len(drafts)
    return budget - left


def add_foreseen(decodes: Decodes, budget: int, memory: SequenceMemory) -> int:
    """Extend decodes by the tokens that are known to follow, where budget and pages are left by everything else.
    Returns how many."""
    left, size = budget, memory.limits.page_size
    for i, (sequence, start) in enumerate(zip(decodes.sequences, decodes.starts, strict=True)):
        if not sequence.foreseen:
            continue
        row = decodes.others.get(i)
        most = min(left, sequence.max_total_tokens - start - 2)  # the last position is sampled and never computed
        tokens = list(sequence.foreseen[start + 1 - len(sequence.token_ids) :][:most])
        first, pages = (row.first_new_page, list(row.new_pages)) if row else (len(sequence.pages), [])
        missing = -(-(start + 1 + len(tokens) - sequence.capacity) // size)
        pages += [memory.grow(sequence) for _ in range(min(missing, memory.pool.num_free))]
        tokens = tokens[: sequence.capacity - start - 1]
        if not tokens:
            continue
        decodes.others[i] = PlanRow(sequence, sequence.slot, [IN_FLIGHT, *tokens], start, True, first, pages)
        sequence.num_scheduled += len(tokens)
        left -= len(tokens)
    return budget - left


def chunk_row(chunk: Chunk) -> PlanRow:
    """From the last token on, the sequence decodes."""
    sequence, start = chunk.sequence, chunk.sequence.num_scheduled
    end = start + chunk.num_tokens
    samples = end == len(sequence.token_ids)
    row = PlanRow(sequence, sequence.slot, sequence.token_ids[start:end], start, samples)
    if chunk.is_new or sequence.is_new:
        sequence.is_new = False
        row.new_pages = list(sequence.pages)  # the slot's table still holds its last owner's
    sequence.num_scheduled = end
    sequence.decoding = samples
    return row
