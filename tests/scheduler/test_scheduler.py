import pytest

from jaxcb.errors import RequestError
from jaxcb.request import FinishReason, Request, SamplingParams
from jaxcb.scheduler.plan import IN_FLIGHT
from tests.scheduler.fake_device import answer_alone, driver

FREE_RUN = SamplingParams(max_tokens=6, ignore_eos=True)


def prompt(length: int, seed: int = 1) -> list[int]:
    return [(seed * 7 + 3 * i) % 50 for i in range(length)]


def test_decodes_come_first_and_take_one_token_each():
    d = driver(depth=0)
    d.add("a", prompt(4), FREE_RUN)
    d.step()
    d.add("b", prompt(40, seed=2), FREE_RUN)
    plan = d.step()
    assert [(row.sequence.request.request_id, len(row.token_ids)) for row in plan.rows] == [("a", 1), ("b", 15)]
    assert plan.num_decodes == 1 and plan.num_tokens == 16


def test_a_long_prompt_never_keeps_a_decode_waiting():
    d = driver(depth=0)
    d.add("a", prompt(4), SamplingParams(max_tokens=12, ignore_eos=True))
    d.step()
    d.add("b", prompt(60, seed=2), SamplingParams(max_tokens=2))
    while "a" not in d.finished:
        assert d.step().rows[0].sequence.request.request_id == "a"
    d.run()
    assert d.answers["a"] == answer_alone(prompt(4), SamplingParams(max_tokens=12, ignore_eos=True), 64)


def test_running_ahead_feeds_the_token_that_is_still_on_the_device():
    d = driver(depth=1)
    d.add("a", prompt(4), FREE_RUN)
    first, second = d.step(), d.scheduler.plan()
    assert first.rows[0].token_ids == prompt(4)
    assert second.rows[0].token_ids == (IN_FLIGHT,) and second.rows[0].start == 4


def test_no_step_is_planned_for_a_sequence_whose_last_token_is_in_flight():
    d = driver(depth=1)
    d.add("a", prompt(4), SamplingParams(max_tokens=1))
    assert d.step() is not None
    assert d.scheduler.plan() is None


def test_an_answer_that_ends_early_costs_one_discarded_token_and_no_page():
    d = driver(depth=1)
    stop = answer_alone(prompt(4), FREE_RUN, 64)[1]
    sampling = SamplingParams(max_tokens=20, stop_token_ids=(stop,), ignore_eos=True)
    d.add("a", prompt(4), sampling)
    d.run()
    assert d.answers["a"] == answer_alone(prompt(4), sampling, 64)
    assert d.finished["a"].finish_reason is FinishReason.STOP and d.finished["a"].stop_id == stop
    assert d.scheduler.num_live_pages == 0


def test_the_newest_is_preempted_comes_back_first_and_answers_the_same():
    d = driver(depth=1, num_kv_pages=8, max_model_len=24, admission_watermark=0.0, max_num_batched_tokens=32)
    long = SamplingParams(max_tokens=16, ignore_eos=True)
    for i, name in enumerate("abc"):
        d.add(name, prompt(7, seed=i), long)
    d.run()
    assert d.scheduler.counters.preemptions > 0
    for i, name in enumerate("abc"):
        assert d.answers[name] == answer_alone(prompt(7, seed=i), long, 24)
    assert next(iter(d.finished)) == "a"


def test_pages_of_a_step_in_flight_are_not_given_out_before_it_commits():
    d = driver(depth=1, num_kv_pages=2, page_size=4, max_model_len=8)
    d.add("a", prompt(4), SamplingParams(max_tokens=4, ignore_eos=True))
    d.step()
    d.scheduler.finish("a", FinishReason.ABORT)
    d.add("b", prompt(5), SamplingParams(max_tokens=1))
    assert d.scheduler.pool.num_used == 2
    assert d.scheduler.plan() is None
    d.commit()
    assert d.scheduler.plan() is not None


def test_a_prompt_that_was_computed_before_is_not_computed_again_but_for_its_last_page():
    d = driver()
    for name in ("a", "b"):
        d.add(name, prompt(16), FREE_RUN)
        d.run()
    assert d.finished["b"].sequence.num_cached_tokens == 12
    assert d.answers["a"] == d.answers["b"] == answer_alone(prompt(16), FREE_RUN, 64)


def test_a_common_beginning_that_is_not_yet_computed_is_not_shared():
    d = driver(max_num_batched_tokens=64, max_num_seqs=8)
    for i in range(8):
        d.add(str(i), [*prompt(16), i], FREE_RUN)
    d.run()
    for i in range(8):
        assert d.answers[str(i)] == answer_alone([*prompt(16), i], FREE_RUN, 64)
        assert d.finished[str(i)].sequence.num_cached_tokens == 0


def test_a_preempted_sequence_finds_its_own_pages_again():
    d = driver(depth=0, num_kv_pages=8, max_model_len=24, admission_watermark=0.0)
    long = SamplingParams(max_tokens=16, ignore_eos=True)
    d.add("a", prompt(7), long)
    d.add("b", prompt(7, seed=2), long)
    d.run()
    assert d.scheduler.counters.preemptions > 0
    again = [row for plan in d.plans for row in plan.rows if row.sequence.num_preemptions and row.first_new_page == 0]
    assert any(row.start > 0 for row in again), "the resumed sequence recomputed everything"


def test_admission_leaves_a_margin_while_others_run():
    d = driver(num_kv_pages=10, admission_watermark=0.3, max_model_len=32)
    d.add("a", prompt(12), FREE_RUN)
    d.add("b", prompt(12, seed=2), FREE_RUN)
    d.step()
    assert d.scheduler.num_running == 1, "4 pages of b would leave 2 of 10, less than the margin of 3"


def test_min_tokens_holds_the_end_back():
    d = driver()
    first = answer_alone(prompt(4), FREE_RUN, 64)
    sampling = SamplingParams(max_tokens=6, min_tokens=2, stop_token_ids=(first[0], first[3]), ignore_eos=True)
    d.add("a", prompt(4), sampling)
    d.run()
    assert d.answers["a"] == first[:4]


@pytest.mark.parametrize(
    ("length", "max_tokens", "param"),
    [(0, 1, "prompt"), (64, 1, "prompt"), (65, 1, "prompt"), (54, 11, "max_tokens"), (4, 10**9, "max_tokens")],
)
def test_an_impossible_request_is_refused_and_leaves_no_trace(length, max_tokens, param):
    d = driver()
    with pytest.raises(RequestError, match=r"64 tokens|no tokens") as error:
        d.scheduler.add(
            Request(request_id="a", prompt_token_ids=prompt(length), sampling=SamplingParams(max_tokens=max_tokens))
        )
    assert error.value.param == param
    assert not d.scheduler.has_requests and d.scheduler.plan() is None


def test_the_longest_possible_request_is_served_to_the_limit():
    d = driver(num_kv_pages=16)
    d.add("a", prompt(63), SamplingParams(max_tokens=1))
    d.add("b", prompt(54), SamplingParams(max_tokens=None, ignore_eos=True))
    d.run()
    assert len(d.answers["a"]) == 1 and len(d.answers["b"]) == 10
    assert d.finished["b"].finish_reason is FinishReason.LENGTH


def test_an_id_in_use_is_refused():
    d = driver()
    d.add("a", prompt(4), FREE_RUN)
    with pytest.raises(RequestError, match="'a' is in use"):
        d.add("a", prompt(4), FREE_RUN)


def test_steps_commit_in_order():
    d = driver(depth=1)
    d.add("a", prompt(4), FREE_RUN)
    d.scheduler.plan()
    second = d.scheduler.plan()
    with pytest.raises(RuntimeError, match="commit in order"):
        d.scheduler.commit(second, [1])
