from __future__ import annotations

import pytest

from bench.common import BenchError
from bench.full_step import full_plan, repeated
from jaxcb.scheduler.plan import IN_FLIGHT
from jaxcb.step.buckets import Bucket
from jaxcb.step.shape import RunnerShape

SHAPE = RunnerShape(num_pages=100, page_size=8, num_slots=16, max_model_len=256)


def test_a_decode_step_has_every_row_at_the_context():
    plan = full_plan(Bucket(4, 4, True), SHAPE, context=20)
    assert plan.decode_only and plan.num_tokens == 4
    assert [(row.token_ids, row.context_len, len(row.new_pages)) for row in plan.rows] == [([IN_FLIGHT], 20, 3)] * 4


def test_a_mixed_step_is_half_decodes_and_full_to_the_last_token():
    plan = full_plan(Bucket(50, 4, False), SHAPE, context=20)
    assert (plan.num_decodes, plan.num_tokens) == (2, 50)
    assert [(row.start, row.num_tokens) for row in plan.rows] == [(19, 1), (19, 1), (0, 24), (0, 24)]


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7, 64, 200])
@pytest.mark.parametrize("num_seqs", [1, 2, 5])
def test_every_bucket_is_filled(num_tokens, num_seqs):
    plan = full_plan(Bucket(num_tokens, num_seqs, False), SHAPE, context=30)
    assert sum(row.num_tokens for row in plan.rows) == num_tokens == plan.num_tokens
    assert len(plan.rows) <= num_seqs
    assert not plan.decode_only


def test_rows_share_neither_pages_nor_slots():
    plan = full_plan(Bucket(64, 8, False), SHAPE, context=20)
    pages = [page for row in plan.rows for page in row.new_pages]
    assert sorted(set(pages)) == list(range(1, len(pages) + 1))
    assert len({row.slot for row in plan.rows}) == len(plan.rows)


def test_the_repeated_step_uploads_no_pages():
    plan = full_plan(Bucket(64, 8, False), SHAPE, context=20)
    again = repeated(plan)
    assert all(not row.new_pages for row in again.rows)
    assert [(row.slot, row.start, row.token_ids) for row in again.rows] == [
        (row.slot, row.start, row.token_ids) for row in plan.rows
    ]


def test_a_context_that_the_pages_cannot_hold_is_refused():
    with pytest.raises(BenchError, match="8 rows at context 200 need 200 pages, the engine has 100"):
        full_plan(Bucket(8, 8, True), SHAPE, context=200)
    with pytest.raises(BenchError, match="a row of 300 tokens passes the engine's limit, 256"):
        full_plan(Bucket(1, 1, True), SHAPE, context=300)
