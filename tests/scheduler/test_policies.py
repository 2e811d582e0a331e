"""Who is admitted next, under each policy; and that nobody waits for ever."""

from __future__ import annotations

import math
import re
import textwrap
from pathlib import Path

import pytest

from jaxcb.config import EngineConfig
from jaxcb.errors import ConfigError, RequestError
from jaxcb.request import Request, SamplingParams
from jaxcb.scheduler.view import LengthPredictor, TenantClock, View
from tests.scheduler.fake_device import Driver, answer_alone, driver

ONE = SamplingParams(max_tokens=1, ignore_eos=True)


def answer_of(length: int) -> SamplingParams:
    return SamplingParams(max_tokens=length, ignore_eos=True)


def prompt(length: int, seed: int = 1) -> list[int]:
    return [(seed * 7 + 3 * i) % 50 for i in range(length)]


def order_of(d: Driver) -> str:
    """Names in the order of their first rows."""
    seen: dict[str, None] = {}
    for plan in d.plans:
        for row in plan.rows:
            seen.setdefault(row.sequence.request.request_id)
    return "".join(seen)


def test_fcfs_admits_in_the_order_of_arrival():
    d = driver(max_num_seqs=1)
    for name, length in zip("abc", (9, 1, 5), strict=True):
        d.add(name, prompt(length), answer_of(length))
    d.run()
    assert order_of(d) == "abc"


def test_sjf_admits_the_shortest_answer_first_and_the_shorter_prompt_among_equals():
    d = driver(max_num_seqs=1, policy="sjf", length_predictor="max_tokens")
    for name, length, most in zip("abcd", (9, 1, 5, 2), (9, 2, 5, 2), strict=True):
        d.add(name, prompt(length), answer_of(most))
    d.run()
    assert order_of(d) == "bdca"


def test_sjf_goes_by_what_requests_with_such_prompts_turned_out_to_need():
    d = driver(max_num_seqs=1, policy="sjf")
    stop = answer_alone(prompt(3), answer_of(8), 64)[0]
    for i in range(5):  # short prompts stop at once, whatever they ask for
        d.add(f"{i}", prompt(3), SamplingParams(max_tokens=40, stop_token_ids=(stop,), ignore_eos=True))
    d.run()
    d.plans.clear()
    d.add("a", prompt(20), answer_of(30))
    d.add("b", prompt(3), SamplingParams(max_tokens=40, stop_token_ids=(stop,), ignore_eos=True))
    d.run()
    assert order_of(d) == "ba"


def test_a_predictor_of_ones_own():
    d = driver(max_num_seqs=1, policy="sjf", length_predictor=lambda request: -request.prompt_token_ids[0])
    for name, first in zip("abc", (1, 3, 2), strict=True):
        d.add(name, [first, 4], answer_of(3))
    d.run()
    assert order_of(d) == "bca"


def test_the_observed_length_follows_the_traffic_by_prompt_length_class():
    predictor = LengthPredictor()
    short = Request(request_id="s", prompt_token_ids=[1] * 5, sampling=SamplingParams(max_tokens=None))
    long = Request(request_id="l", prompt_token_ids=[1] * 500, sampling=SamplingParams(max_tokens=100))
    assert predictor(short) == math.inf and predictor(long) == 100
    for _ in range(200):
        predictor.learn(6, 10)
        predictor.learn(400, 1000)
    assert predictor(short) == pytest.approx(10) and predictor(long) == 100
    for _ in range(200):
        predictor.learn(6, 30)
    assert predictor(short) == pytest.approx(30, abs=0.1)


def test_priority_admits_the_lowest_number_first():
    d = driver(max_num_seqs=1, policy="priority")
    for name, priority in zip("abcd", (1, 0, -2, 0), strict=True):
        d.add(name, prompt(3), ONE, priority=priority)
    d.run()
    assert order_of(d) == "cbda"


def test_priority_takes_the_place_of_running_work_behind_it():
    d = driver(depth=0, max_num_seqs=2, policy="priority")
    d.add("a", prompt(4), answer_of(20), priority=1)
    d.add("b", prompt(4, seed=2), answer_of(20), priority=2)
    for _ in range(4):
        d.step()
    d.add("urgent", prompt(4, seed=3), answer_of(3), priority=0)
    plan = d.step()
    assert [row.sequence.request.request_id for row in plan.rows] == ["a", "urgent"]
    d.run()
    assert d.finished["b"].sequence.num_preemptions == 1 and d.finished["a"].sequence.num_preemptions == 0
    assert d.answers["b"] == answer_alone(prompt(4, seed=2), answer_of(20), 64)


def test_priority_preempts_for_pages_no_more_than_it_needs_and_nothing_if_that_is_not_enough():
    d = driver(depth=0, max_num_seqs=4, num_kv_pages=16, policy="priority", admission_watermark=0.0)
    for i, (name, priority) in enumerate(zip("abc", (0, 2, 2), strict=True)):
        d.add(name, prompt(14, seed=i), answer_of(12), priority=priority)
    while not all(d.answers.values()):
        d.step()
    d.add("big", prompt(26, seed=5), answer_of(2), priority=1)
    d.step()
    assert list(d.scheduler.roster.running) == ["a", "b", "big"], "c alone made room"
    huge = driver(depth=0, num_kv_pages=16, policy="priority", admission_watermark=0.0)
    huge.add("a", prompt(36), answer_of(9), priority=0)
    huge.add("b", prompt(15, seed=2), answer_of(9), priority=2)
    for _ in range(5):
        huge.step()
    huge.add("c", prompt(60, seed=3), answer_of(2), priority=1)
    huge.step()
    assert huge.scheduler.counters.preemptions == 0, "all of b would not make room for c"


def test_work_of_the_same_priority_is_never_preempted_for_its_like():
    d = driver(depth=0, max_num_seqs=1, policy="priority")
    d.add("a", prompt(4), answer_of(9), priority=1)
    d.step()
    d.add("b", prompt(4), answer_of(9), priority=1)
    d.run()
    assert d.scheduler.counters.preemptions == 0


def test_ageing_lets_low_priority_through_a_stream_of_urgent_requests():
    finished_at = {}
    for ageing in (5.0, math.inf):
        d = driver(max_num_seqs=1, policy="priority", priority_ageing_s=ageing)
        d.add("low", prompt(3), answer_of(4), priority=1, arrival_s=0.0)
        for second in range(1, 40):
            d.add(f"{second}", prompt(3), answer_of(4), priority=0, arrival_s=float(second))
            for _ in range(3):
                d.step()
            if "low" in d.finished:
                break
        finished_at[ageing] = second
    assert finished_at[5.0] <= 12 and finished_at[math.inf] == 39


def test_deadline_admits_the_earliest_first_and_those_without_one_last():
    d = driver(max_num_seqs=1, policy="deadline")
    for name, arrival, deadline in (("a", 0.0, None), ("b", 0.0, 9.0), ("c", 1.0, 3.0), ("d", 2.0, 9.5)):
        d.add(name, prompt(3), ONE, arrival_s=arrival, ttft_deadline_s=deadline)
    d.run()
    assert order_of(d) == "cbda"


def test_prefix_groups_by_the_longest_cached_beginning_for_a_bounded_wait():
    common = prompt(16, seed=3)
    d = driver(max_num_seqs=1, policy="prefix", max_overtakes=3)
    d.add("first", common, ONE)
    d.run()
    d.plans.clear()
    d.add("x", prompt(9, seed=4), ONE)
    for name in "abcdef":
        d.add(name, [*common, 5], ONE)
    d.run()
    assert order_of(d) == "abcxdef"


@pytest.mark.parametrize(("num_host_pages", "left"), [(0, (12, 8, 0)), (1, (16, 12, 4))])
def test_what_the_cache_would_give_is_looked_up_again_when_it_has_changed(num_host_pages, left):
    scheduler = driver(policy="prefix", num_kv_pages=16, num_host_pages=num_host_pages).scheduler
    sequence = scheduler.add(Request(request_id="a", prompt_token_ids=prompt(17)))
    view = View(scheduler.limits, scheduler.cache)
    assert view.cached_tokens(sequence) == 0
    scheduler.prefixes.place(prompt(17))
    assert view.cached_tokens(sequence) == 16
    scheduler.prefixes.reset()
    assert view.cached_tokens(sequence) == 0
    scheduler.prefixes.place(prompt(17))
    for count, tokens in zip((13, 1, 2), left, strict=True):  # leaves are evicted, to host memory if there is room
        scheduler.pool.allocate(count)
        assert view.cached_tokens(sequence) == tokens


def test_fair_gives_each_tenant_its_turn_by_tokens():
    d = driver(max_num_seqs=1, policy="fair", length_predictor="max_tokens")
    for i in range(6):
        d.add(f"{i}", prompt(4), answer_of(4), tenant="many")
    d.add("a", prompt(4), answer_of(4), tenant="few")
    d.add("b", prompt(4), answer_of(4), tenant="few")
    d.run()
    assert order_of(d) == "0a1b2345"


def test_an_idle_tenant_gains_no_credit():
    clock = TenantClock()
    for _ in range(5):
        clock.admitted(clock.book("busy", 10.0))
    assert clock.book("idle", 10.0) == 40.0


@pytest.mark.parametrize("source", ["README.md", "jaxcb/scheduler/policy.py"])
def test_a_policy_is_a_function(source):
    """The function that the documentation gives, as it stands there."""
    text = (Path(__file__).parents[2] / source).read_text(encoding="utf-8")
    defined = {}
    exec(textwrap.dedent(re.search(r"^ *def short_prompts_first.*?$\n.*?$", text, re.M)[0]), defined)
    policy = defined["short_prompts_first"]
    d = driver(max_num_seqs=1, policy=policy)
    d.add("a", prompt(40), ONE, arrival_s=0.0)
    d.add("b", prompt(5), ONE, arrival_s=0.1)
    d.add("c", prompt(5), ONE, arrival_s=0.5)
    d.run()
    assert order_of(d) == "bac"
    assert EngineConfig(policy=policy).policy is policy


def raises(*_: object) -> float:
    raise KeyError("tier")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (raises, "raised KeyError for this request: 'tier'"),
        (lambda *_: None, "must return a number.* got None"),
        (lambda *_: "high", "must return a number.* got 'high'"),
        (lambda *_: (1, math.nan), r"must return a number.* got \(1, nan\)"),
        (lambda *_: [1], r"must return a number.* got \[1\]"),
    ],
)
@pytest.mark.parametrize("knob", ["policy", "length_predictor"])
def test_where_a_function_of_ones_own_fails_its_request_is_refused_and_the_others_go_on(knob, function, reason):
    def sometimes(what: object, *view: object) -> float:
        request = what.request if view else what
        return function(what, *view) if request.tenant == "odd" else 1.0

    d = driver(**{"policy": "sjf", knob: sometimes})
    d.add("a", prompt(3), answer_of(5))
    for name in "bc":
        with pytest.raises(RequestError, match=reason) as error:
            d.add(name, prompt(3), answer_of(5), tenant="odd")
        assert error.value.param == knob
    d.add("b", prompt(3), answer_of(5))
    d.run()
    assert set(d.finished) == {"a", "b"}
    d.scheduler.check()


def test_where_a_policy_fails_for_one_of_several_answers_none_is_kept():
    d = driver(policy=lambda sequence, view: 1 // (2 - sequence.ticket))
    requests = [Request(request_id=f"{i}", prompt_token_ids=[1, 2], sampling=answer_of(2)) for i in range(4)]
    with pytest.raises(RequestError, match="ZeroDivisionError"):
        d.scheduler.add_choices(requests)
    assert not d.scheduler.has_requests
    d.scheduler.add_choices(requests[:3])
    assert d.scheduler.num_waiting == 3


def test_keys_of_different_lengths_and_kinds_can_be_compared():
    keys = {"a": (2, 1.5), "b": 2, "c": (True, 9), "d": 0.5}
    d = driver(max_num_seqs=1, policy=lambda sequence, view: keys[sequence.request.request_id])
    for name in keys:
        d.add(name, prompt(3), ONE)
    d.run()
    assert order_of(d) == "dcba"


def test_a_preempted_sequence_keeps_the_key_of_its_queueing():
    asked = []
    d = driver(max_num_seqs=2, num_kv_pages=7, policy=lambda sequence, view: asked.append(sequence) or len(asked))
    for name in "ab":
        d.add(name, prompt(9, seed=ord(name)), answer_of(15))
    d.run()
    assert d.scheduler.counters.preemptions > 0 and len(asked) == 2


def test_a_policy_that_would_starve_someone_is_overruled():
    d = driver(max_num_seqs=1, policy=lambda sequence, view: -sequence.ticket, max_overtakes=2)
    for name in "abcdef":
        d.add(name, prompt(3), ONE)
    d.run()
    assert order_of(d) == "feadcb"


def test_a_huge_prompt_at_the_head_is_passed_so_often_and_no_more():
    for passes, wanted in ((0, "rhabcde"), (2, "rabhcde")):
        d = driver(depth=0, max_num_seqs=2, num_kv_pages=16, admission_watermark=0.0, max_passes=passes)
        d.add("r", prompt(8), answer_of(24))
        d.step()
        d.add("h", prompt(56, seed=2), ONE)
        for i, name in enumerate("abcde"):
            d.add(name, prompt(3, seed=i), answer_of(2))
        d.run()
        assert order_of(d) == wanted


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("policy", "lifo"),
        ("policy", 3),
        ("length_predictor", "psychic"),
        ("priority_ageing_s", 0),
        ("max_overtakes", 0),
        ("max_passes", -1),
        ("batching", "dynamic"),
        ("prefill_first", 1),
        ("max_chunk_tokens", 0),
        ("max_num_partial_prefills", 0),
        ("long_prefill_token_threshold", -1),
        ("exact_fill", "yes"),
        ("itl_target_ms", 0),
        ("itl_target_ms", math.nan),
        ("waiting_served_ratio", -0.1),
        ("max_waiting_steps", 0),
        ("reservation", "none"),
        ("admission_watermark", 1.0),
        ("preemption", "never"),
        ("victim", "me"),
        ("num_slots", 1),
    ],
)
def test_a_knob_that_can_not_work_is_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=field) as error:
        driver(**{field: value})
    assert error.value.param == field


def test_knobs_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match="exact_fill"):
        driver(exact_fill=True, enable_chunked_prefill=False, max_num_batched_tokens=64)
    with pytest.raises(ConfigError, match="longest sequence"):
        driver(enable_chunked_prefill=False, max_num_batched_tokens=63, max_model_len=64)
    with pytest.raises(ConfigError, match="'full'"):
        driver(reservation="full", num_kv_pages=15, max_model_len=64)
