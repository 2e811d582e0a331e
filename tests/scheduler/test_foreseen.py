"""Tokens that a grammar forces are computed together, and change nothing else."""

from __future__ import annotations

import pytest

from jaxcb.request import SamplingParams
from jaxcb.scheduler.plan import IN_FLIGHT
from tests.scheduler.fake_device import Driver, answer_alone, driver

PROMPT = [5, 6, 7]
TWELVE = SamplingParams(max_tokens=12, ignore_eos=True)
ANSWER = answer_alone(PROMPT, TWELVE, 64)


def foreseeing_driver(**changes: object) -> Driver:
    """One that knows only what a test tells it."""
    d = driver(**changes)
    d.chance_to_foresee = 0.0
    return d


@pytest.mark.parametrize("depth", [0, 1])
def test_known_tokens_are_computed_in_one_step(depth):
    d = foreseeing_driver(depth=depth)
    d.add("a", PROMPT, TWELVE)
    d.foresee("a", ANSWER, 4)
    d.step()
    plan = d.step()
    assert plan.others[0].token_ids == [IN_FLIGHT, *ANSWER[1:4]]
    assert plan.num_tokens == 4 and plan.num_foreseen == 3 and not plan.decode_only
    d.run()
    assert d.answers["a"] == ANSWER
    assert len(d.plans) == 12 - 3


def test_without_a_free_page_they_wait():
    """The second page holds the token in flight and three more of the five that are known."""
    d = foreseeing_driver(depth=0, num_kv_pages=2, max_model_len=8, max_num_seqs=1)
    four = SamplingParams(max_tokens=4, ignore_eos=True)
    answer = answer_alone([5, 6, 7, 8], four, 8)
    d.add("a", [5, 6, 7, 8], four)
    d.foresee("a", answer, 4)
    d.run()
    assert d.answers["a"] == answer
    assert [plan.num_tokens for plan in d.plans] == [4, 3]  # the last token is sampled and never computed


def test_everybody_else_is_served_first():
    d = foreseeing_driver(depth=0, max_num_batched_tokens=4)
    d.add("a", PROMPT, TWELVE)
    d.step()
    d.add("b", [1, 2, 3, 4, 5, 6], TWELVE)
    d.foresee("a", ANSWER, 7)
    plan = d.step()
    assert plan.num_decodes == 1 and plan.num_foreseen == 0 and plan.chunks[0].num_tokens == 3
    plan = d.step()
    assert plan.num_decodes == 1 and plan.num_foreseen == 0 and plan.chunks[0].num_tokens == 3
    d.run()
    assert d.answers["a"] == ANSWER
