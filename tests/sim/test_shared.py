"""Traces with shared beginnings and users who wait, and what the real prefix cache makes of them."""

import itertools
import math

import numpy as np
import pytest

from jaxcb.errors import ConfigError
from jaxcb.sim import LinearStepTime, TraceRequest, make_trace, one_engine, simulate
from tests.scheduler.fake_device import limits
from tests.sim.runs import MS

ROOMY = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 4096, "num_kv_pages": 4096}


def common(first, second):
    """Tokens that two prompts share from the beginning on."""
    total = 0
    for (id_a, length_a), (id_b, length_b) in zip(first.content, second.content, strict=False):
        if id_a != id_b:
            break
        total += min(length_a, length_b)
        if length_a != length_b:
            break
    return total


def test_groups_share_a_system_prompt_and_nothing_else():
    trace = make_trace("shared-prefix", 64, rate=4.0)
    pairs = list(itertools.combinations(trace, 2))
    shared = [common(*pair) for pair in pairs]
    assert set(shared) == {0, 2048} and shared.count(2048) == 4 * (16 * 15 // 2)
    assert all(request.num_prompt_tokens == 2048 + 128 for request in trace)


def test_a_few_shot_tree_shares_more_the_closer_two_leaves_are():
    trace = make_trace("few-shot-tree", 300)
    shared = [common(*pair) for pair in itertools.combinations(trace, 2)]
    assert set(shared) == {300, 800, 1800}
    assert np.mean([value == 1800 for value in shared]) == pytest.approx(1 / 64, abs=0.006)
    assert np.mean([value >= 800 for value in shared]) == pytest.approx(1 / 4, abs=0.03)


def test_a_turn_repeats_the_chat_and_comes_after_its_answer():
    trace = make_trace("multi-turn", 20, rate=1.0)
    assert [request.after for request in trace] == [None] * 4 + list(range(16))
    for request in trace[4:]:
        before = trace[request.after]
        assert request.content[:-1] == (*before.content, (before.answer, before.num_output_tokens))
        assert request.num_prompt_tokens == sum(length for _, length in request.content)


def test_the_next_turn_finds_the_prompt_and_the_answer_of_the_last_in_the_cache():
    trace = [
        TraceRequest(0.0, 40, 24, ((1, 40),), answer=2),
        TraceRequest(0.5, 76, 8, ((1, 40), (2, 24), (3, 12)), after=0),
        TraceRequest(2.0, 76, 8, ((1, 40), (4, 24), (3, 12))),
    ]
    first, second, other = simulate(limits(**ROOMY), trace, MS).requests
    assert second.arrival_s == pytest.approx(first.finished_s + 0.5)
    assert (first.num_cached_tokens, other.num_cached_tokens) == (0, 40)
    assert 40 + 24 - 4 <= second.num_cached_tokens <= 40 + 24


def test_runs_that_are_equal_but_stand_behind_different_ones_are_not_shared():
    trace = [
        TraceRequest(float(i), 40, 4, content) for i, content in enumerate([((1, 20), (2, 20)), ((3, 20), (2, 20))])
    ]
    assert simulate(limits(**ROOMY), trace, MS).num_cached_tokens == 0


def test_bursts_come_together():
    trace = make_trace("bursts", 96, rate=10.0)
    starts = [request.arrival_s for request in trace]
    assert starts[0] == starts[31] < starts[32] == starts[63] < starts[64]
    many = make_trace("bursts", 32_000, rate=10.0)
    assert len(many) / many[-1].arrival_s == pytest.approx(10.0, rel=0.1)


def test_in_a_closed_loop_as_many_requests_are_open_as_there_are_users():
    simulation = one_engine(limits(**ROOMY), make_trace("sharegpt", 60, num_users=3), LinearStepTime())
    most = 0
    while simulation.step():
        most = max(most, simulation.scheduler.num_running + simulation.scheduler.num_waiting)
    records = simulation.result().requests
    assert most == 3 and all(record.finished_s is not None for record in records)
    assert all(records[i].arrival_s == records[i - 3].finished_s for i in range(3, 60))


def test_a_user_goes_on_after_a_request_that_was_refused():
    trace = [TraceRequest(0.0, 5000, 1), TraceRequest(0.25, 10, 2, after=0)]
    first, second = simulate(limits(**ROOMY), trace, MS).requests
    assert first.refused and second.arrival_s == 0.25 and second.finished_s is not None


def test_a_request_cannot_come_after_a_later_one():
    with pytest.raises(ConfigError, match="request 0 of the trace comes after request 1"):
        simulate(limits(**ROOMY), [TraceRequest(0.0, 5, 1, after=1), TraceRequest(0.0, 5, 1)], MS)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("multi-turn", {"num_users": 3}, "has users of its own"),
        ("sharegpt", {"num_users": 3, "rate": 2.0}, "leave rate and gap_cv out"),
        ("sharegpt", {"num_users": 0}, "num_users must be at least 1"),
        ("sharegpt", {"gap_cv": 0.0, "rate": 1.0}, "gap_cv must be positive"),
        ("sharegpt", {"gap_cv": math.inf, "rate": 1.0}, "gap_cv must be positive"),
        ("trace.txt", {}, "or a file that ends in .csv or .jsonl; got 'trace.txt'"),
    ],
)
def test_what_cannot_be_drawn_is_refused(name, changes, message):
    with pytest.raises(ConfigError, match=message):
        make_trace(name, 10, **changes)
