"""StepLoad: what a planned step has to compute, in the three numbers that decide how long it takes."""

from __future__ import annotations

from typing import NamedTuple

from jaxcb.scheduler.plan import StepPlan


class StepLoad(NamedTuple):
    """What a step has to compute.

    A worked example: sequence a decodes at position 7, b is given positions 4, 5 and 6 of its prompt.

        row  tokens  context  attended positions
        a    1       8        8
        b    3       7        5 + 6 + 7 = 18         StepLoad(num_tokens=4, kv_tokens=15, num_pairs=26)
    """

    num_tokens: int
    kv_tokens: int
    """Positions whose KV is read, each once a sequence."""
    num_pairs: int
    """Pairs of a query and a position that it attends to."""


def load_of(plan: StepPlan) -> StepLoad:
    """What a planned step has to compute."""
    kv_tokens = num_pairs = sum(plan.starts) + plan.num_decodes
    for row in plan.others.values():
        num_drafts = row.num_drafts
        kv_tokens += num_drafts
        num_pairs += num_drafts * (2 * row.start + num_drafts + 3) // 2
    for row in plan.chunks:
        kv_tokens += row.context_len
        num_pairs += row.num_tokens * (2 * row.start + row.num_tokens + 1) // 2
    return StepLoad(plan.num_tokens, kv_tokens, num_pairs)
