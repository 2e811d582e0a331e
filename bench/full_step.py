"""Synthetic plans that fill a bucket to the last token, for timing a compiled shape by itself.

A worked example: mixed bucket (T 8, S 4), context 3. Two rows decode there, the other six tokens are two prompts:

    row  token_ids       start  samples
    0    [IN_FLIGHT]     2      yes
    1    [IN_FLIGHT]     2      yes
    2    [0, 0, 0]       0      yes
    3    [0, 0, 0]       0      yes
"""

from __future__ import annotations

import dataclasses

from bench.common import BenchError
from bench.inprocess import exact_length
from bench.workload import Item
from jaxcb.scheduler import PlanRow, Sequence, StepPlan
from jaxcb.scheduler.plan import IN_FLIGHT
from jaxcb.step.buckets import Bucket
from jaxcb.step.shape import RunnerShape


def full_plan(bucket: Bucket, shape: RunnerShape, context: int) -> StepPlan:
    """A plan of exactly ``bucket.num_tokens`` tokens. Its pages are new: launch it once, then :func:`repeated`.

    Arguments:
        shape: of the runner, whose slots and pages the plan uses from the first one on.
        context: tokens that a decode attends to, and tokens of a prompt (more if the rows don't suffice).

    Raises:
        BenchError: the runner can't hold such a step.
    """
    num_decodes = bucket.num_seqs if bucket.decode_only else min(bucket.num_seqs, bucket.num_tokens) // 2
    lengths = _prompt_lengths(bucket.num_tokens - num_decodes, bucket.num_seqs - num_decodes, context)
    longest = max([context, *lengths])
    if longest > shape.max_model_len:
        raise BenchError(f"{bucket}: a row of {longest} tokens passes the engine's limit, {shape.max_model_len}")
    sequence = _sequence()
    rows: list[PlanRow] = []
    next_page = 1  # 0 is the trash page
    for slot, length in enumerate([1] * num_decodes + lengths):
        start = context - 1 if slot < num_decodes else 0
        num_pages = -(-(start + length) // shape.page_size)
        rows.append(
            PlanRow(
                sequence=sequence,
                slot=slot,
                token_ids=[IN_FLIGHT] if slot < num_decodes else [0] * length,
                start=start,
                samples=True,
                new_pages=list(range(next_page, next_page + num_pages)),
            )
        )
        next_page += num_pages
    if next_page - 1 > shape.num_pages:
        raise BenchError(
            f"{bucket}: {len(rows)} rows at context {context} need {next_page - 1} pages, the engine has "
            f"{shape.num_pages}. Give a shorter --context"
        )
    return StepPlan.of(rows, num_decodes)


def repeated(plan: StepPlan) -> StepPlan:
    """The same step again: the device's block tables know its pages by now."""
    rows = [dataclasses.replace(row, new_pages=[]) for row in plan.rows if isinstance(row, PlanRow)]
    return StepPlan.of(rows, plan.num_decodes)


def _prompt_lengths(num_tokens: int, num_rows: int, context: int) -> list[int]:
    """Prompts that share ``num_tokens``, of ``context`` tokens each as long as the rows suffice."""
    if num_tokens == 0:
        return []
    each = max(context, -(-num_tokens // num_rows))
    full, last = divmod(num_tokens, each)
    return [each] * full + [last] * (last > 0)


def _sequence() -> Sequence:
    """Greedy, with nothing that would end it; rows may share it, since no scheduler counts its tokens."""
    request = exact_length("full-step", Item([0], 1))
    return Sequence(request=request, token_ids=[0], max_total_tokens=2, end_ids=frozenset())
