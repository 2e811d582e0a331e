"""The plan accounts for guesses that the next step verifies: more positions are planned than may be kept, under every
policy and whatever becomes of a victim's pages."""

from __future__ import annotations

import pytest

from jaxcb.request import SamplingParams
from jaxcb.scheduler.policy import POLICIES
from tests.scheduler.fake_device import Driver, answer_alone, driver
from tests.scheduler.fuzz import guess

NAMES = "abcdef"


def answer_of(name: str) -> SamplingParams:
    return SamplingParams(max_tokens=12 + NAMES.index(name) % 3, ignore_eos=True)


def prompt_of(name: str) -> list[int]:
    return [(7 * ord(name) + 3 * i) % 50 for i in range(4 + NAMES.index(name))]


def loaded(**changes: object) -> Driver:
    """Six requests over pages for one and a half of the longest."""
    d = driver(max_model_len=24, num_kv_pages=9, admission_watermark=0.0, drafter=guess, **changes)
    for number, name in enumerate(NAMES):
        d.add(
            name,
            prompt_of(name),
            answer_of(name),
            priority=number % 3,
            tenant="xy"[number % 2],
            ttft_deadline_s=30.0 - number,
            arrival_s=float(number),
        )
    return d


@pytest.mark.parametrize("preemption", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("depth", [0, 1])
def test_answers_with_guesses_are_those_without(depth, policy, preemption):
    d = loaded(depth=depth, policy=policy, preemption=preemption, num_host_pages=30)
    d.run()
    for name in NAMES:
        assert d.answers[name] == answer_alone(prompt_of(name), answer_of(name), 24), name
    counters = d.scheduler.counters
    assert 0 < counters.draft_tokens_accepted < counters.draft_tokens
    assert counters.preemptions > 0
    if preemption != "auto":
        assert counters.swaps == (counters.preemptions if preemption == "swap" else 0)
    assert d.scheduler.num_live_pages == 0 and d.scheduler.host.num_used == d.scheduler.host.num_freed


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_a_step_moves_on_by_the_guesses_that_were_kept_and_one(kept):
    """Three guesses are planned, with pages for them; what isn't kept is planned again."""
    d = driver(depth=0, drafter=lambda sequence, most: [1, 2, 3][:most])
    d.add("a", [5, 6, 7], SamplingParams(max_tokens=20, ignore_eos=True))
    d.scheduler.commit(d.scheduler.plan(), [9])
    plan = d.scheduler.plan()
    (row,) = plan.rows
    assert (row.start, row.num_tokens, plan.num_tokens, plan.num_drafts) == (3, 4, 4, 3)
    sequence = row.sequence
    assert sequence.capacity >= 7
    sampled = [*[1, 2, 3][:kept], 9]
    tokens = d.scheduler.commit(plan, [sampled])
    assert [event.token_id for event in tokens] == sampled
    assert sequence.num_computed == sequence.num_scheduled == 4 + kept
    assert d.scheduler.plan().rows[0].start == 4 + kept
    d.scheduler.check()


def test_an_end_among_the_guesses_that_were_kept_discards_the_rest():
    d = driver(depth=0, drafter=lambda sequence, most: [1, 2, 3][:most])
    d.add("a", [5, 6, 7], SamplingParams(max_tokens=20, stop_token_ids=(2,), ignore_eos=True))
    d.scheduler.commit(d.scheduler.plan(), [9])
    tokens = d.scheduler.commit(d.scheduler.plan(), [[1, 2, 3, 9]])
    assert [(event.token_id, event.stop_id) for event in tokens] == [(1, None), (2, 2)]
    assert not d.scheduler.has_requests and d.scheduler.num_live_pages == 0
