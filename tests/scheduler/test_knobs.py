"""What each knob does to a plan."""

from __future__ import annotations

import pytest

from jaxcb.errors import RequestError
from jaxcb.request import Request, SamplingParams
from jaxcb.scheduler.chunks import prompt_tokens
from jaxcb.scheduler.step_time import StepTimeFit
from tests.scheduler.fake_device import Driver, answer_alone, driver, limits
from tests.scheduler.fuzz import guess


def answer_of(length: int) -> SamplingParams:
    return SamplingParams(max_tokens=length, ignore_eos=True)


def prompt(length: int, seed: int = 1) -> list[int]:
    return [(seed * 7 + 3 * i) % 50 for i in range(length)]


def sizes(d: Driver) -> list[dict[str, int]]:
    """Of each step, the tokens of each request."""
    return [{row.sequence.request.request_id: row.num_tokens for row in plan.rows} for plan in d.plans]


def test_a_chunk_is_no_longer_than_allowed():
    d = driver(depth=0, max_chunk_tokens=5)
    d.add("a", prompt(12), answer_of(1))
    d.run()
    assert sizes(d) == [{"a": 5}, {"a": 5}, {"a": 2}]


def test_no_more_prompts_are_begun_than_allowed():
    d = driver(depth=0, max_chunk_tokens=5, max_num_partial_prefills=1)
    d.add("a", prompt(12), answer_of(1))
    d.add("b", prompt(12, seed=2), answer_of(1))
    d.run()
    assert sizes(d) == [{"a": 5}, {"a": 5}, {"a": 2, "b": 5}, {"b": 5}, {"b": 2}]


def test_short_prompts_get_past_a_long_one():
    """vllm#21495: one very long prompt kept short newcomers waiting until it was done."""
    d = driver(depth=0, max_model_len=256)
    d.add("long", prompt(100), answer_of(1))
    d.step()
    d.add("short", prompt(3, seed=2), answer_of(2))
    d.run()
    assert sizes(d)[0] == {"long": 16}, "alone it has the whole budget"
    assert sizes(d)[1] == {"long": 13, "short": 3}, "what nobody else wants is its own again"
    off = driver(depth=0, max_model_len=256, long_prefill_token_threshold=0)
    off.add("long", prompt(100), answer_of(1))
    off.add("short", prompt(3, seed=2), answer_of(2))
    off.run()
    assert next(step for step in sizes(off) if "short" in step) == {"long": 4, "short": 3}


def test_long_prompts_take_turns_and_none_of_the_budget_is_lost():
    d = driver(depth=0, max_model_len=256)
    for name in "ab":
        d.add(name, prompt(40, seed=ord(name)), answer_of(1))
    d.run()
    assert sizes(d) == [{"a": 16}, {"a": 16}, {"a": 8, "b": 8}, {"b": 16}, {"b": 16}]


def test_exact_fill_trims_the_last_chunk_to_a_compiled_size():
    d = driver(depth=0, exact_fill=True, step_sizes=(4, 8, 16), max_num_seqs=3)
    d.add("a", prompt(3), answer_of(6))
    d.add("b", prompt(10, seed=2), answer_of(2))
    d.run()
    assert sizes(d)[:3] == [{"a": 3, "b": 5}, {"a": 1, "b": 3}, {"a": 1, "b": 2}]
    assert d.plans[2].num_tokens == 3, "below the smallest size there is nothing to trim to"


def test_exact_fill_cuts_no_prompt_short_that_would_be_one_too_many():
    d = driver(
        depth=0,
        exact_fill=True,
        step_sizes=(32, 64),
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=200,
        max_num_partial_prefills=1,
        max_chunk_tokens=20,
    )
    d.add("a", prompt(40), answer_of(2))
    d.add("b", prompt(15, seed=2), answer_of(2))
    d.run()
    assert sizes(d)[0] == {"a": 20, "b": 15}


def test_whole_prompts_alone_are_started_without_chunked_prefill():
    d = driver(depth=0, enable_chunked_prefill=False, max_num_batched_tokens=16, max_model_len=16, num_kv_pages=16)
    d.add("a", prompt(10), answer_of(2))
    d.add("b", prompt(7, seed=2), answer_of(2))
    d.run()
    assert sizes(d) == [{"a": 10}, {"a": 1, "b": 7}, {"b": 1}]


def test_prefill_first_computes_prompts_in_steps_of_their_own():
    d = driver(depth=0, prefill_first=True)
    d.add("a", prompt(4), answer_of(4))
    d.step()
    d.add("b", prompt(20, seed=2), answer_of(2))
    d.run()
    assert sizes(d) == [{"a": 4}, {"b": 16}, {"b": 4}, {"a": 1, "b": 1}, {"a": 1}, {"a": 1}]


def test_a_static_batch_takes_nobody_in_until_it_is_done():
    d = driver(depth=0, batching="static", max_num_batched_tokens=8)
    for name, length in zip("abc", (16, 16, 9), strict=True):
        d.add(name, prompt(6, seed=ord(name)), answer_of(length))
    d.add("late", prompt(3, seed=9), answer_of(1))
    while d.scheduler.num_waiting:
        d.step()
    d.add("later", prompt(3, seed=8), answer_of(1))
    d.run()
    first = next(i for i, step in enumerate(sizes(d)) if "later" in step)
    assert {"a", "b", "c", "late"}.isdisjoint(sizes(d)[first])
    assert sizes(d)[0] == {"a": 6, "b": 2}, "a batch larger than the budget forms over several steps"


def test_the_waiting_served_ratio_holds_newcomers_back_for_a_while():
    d = driver(depth=0, waiting_served_ratio=2.0, max_waiting_steps=5)
    d.add("a", prompt(3), answer_of(20))
    d.step()
    d.add("b", prompt(3, seed=2), answer_of(2))
    for _ in range(4):
        assert "b" not in {row.sequence.request.request_id for row in d.step().rows}
    d.add("c", prompt(3, seed=3), answer_of(2))
    assert len(d.step().rows) == 3, "two wait for one that runs"
    d = driver(depth=0, waiting_served_ratio=2.0, max_waiting_steps=5)
    d.add("a", prompt(3), answer_of(20))
    d.step()
    d.add("b", prompt(3, seed=2), answer_of(2))
    d.run()
    assert next(step for step in sizes(d) if "b" in step) == sizes(d)[6], "it has waited long enough"


@pytest.mark.parametrize(("reservation", "together", "preempted"), [("optimistic", 3, True), ("guaranteed", 1, False)])
def test_a_guarantee_admits_fewer_and_preempts_none(reservation, together, preempted):
    d = driver(
        reservation=reservation, num_kv_pages=8, max_model_len=24, admission_watermark=0.0, max_num_batched_tokens=32
    )
    for i, name in enumerate("abc"):
        d.add(name, prompt(7, seed=i), answer_of(16))
    d.step()
    assert d.scheduler.num_running == together
    d.run()
    assert (d.scheduler.counters.preemptions > 0) == preempted


def test_a_full_reservation_holds_pages_for_the_longest_answer_from_the_start():
    d = driver(reservation="full", num_kv_pages=32, max_model_len=64)
    for i, name in enumerate("abc"):
        d.add(name, prompt(3, seed=i), answer_of(2))
    d.step()
    assert d.scheduler.num_running == 2 and d.scheduler.pool.num_used == 32


def test_the_victim_is_the_one_that_loses_least():
    for victim, wanted in (("newest", "c"), ("least_progress", "b")):
        d = driver(
            depth=0,
            victim=victim,
            num_kv_pages=10,
            max_model_len=40,
            admission_watermark=0.0,
            max_num_batched_tokens=40,
            enable_prefix_caching=False,
        )
        for i, (name, length) in enumerate(zip("abc", (11, 6, 15), strict=True)):
            d.add(name, prompt(length, seed=i), answer_of(24))
        while not d.scheduler.counters.preemptions:
            d.step()
        assert [s.request.request_id for s in d.scheduler.roster.waiting] == [wanted]


def test_the_budget_follows_the_time_between_tokens_that_is_to_be_held():
    d = driver(depth=0, itl_target_ms=20.0, max_num_batched_tokens=512, max_model_len=2048, num_kv_pages=2048)
    step_s = lambda tokens: 1e-3 + 1e-4 * tokens  # noqa: E731  # the machine: 190 tokens in 20 ms

    def run(steps: int) -> list[int]:
        tokens = []
        for _ in range(steps):
            plan = d.step()
            d.scheduler.observe(plan, step_s(plan.num_tokens))
            tokens.append(plan.num_tokens)
        return tokens

    d.add("a", prompt(4), answer_of(200))
    run(10)
    d.add("b", prompt(1500, seed=2), answer_of(50))
    tokens = run(30)
    chunks = [count for count in tokens if count > 2]
    assert max(chunks) <= 190, "no step takes longer than 20 ms"
    assert max(chunks) >= 150, "and the time is used"
    assert sum(chunks) > 1400


def test_a_target_that_decodes_alone_miss_still_lets_prompts_on():
    fit = StepTimeFit()
    for tokens in (4, 8, 4, 8, 16, 4, 8, 4, 16):
        fit.observe(tokens, 100, 0.05)
    assert prompt_tokens(limits(itl_target_ms=1.0, max_num_batched_tokens=512), fit, 4, 100) == 4


def test_the_step_time_fit_finds_what_the_steps_were_made_of():
    fit = StepTimeFit()
    for i in range(200):
        tokens, context = 1 + i * 37 % 300, i * 101 % 5000
        fit.observe(tokens, context, 2e-3 + 3e-5 * tokens + 4e-7 * context)
    assert fit.seconds(100, 1000) == pytest.approx(2e-3 + 3e-3 + 4e-4, rel=1e-3)
    assert fit.recompute_s(100, 64) == pytest.approx(3e-3 + 4e-7 * (64 + 100), rel=1e-3)
    assert fit.recompute_s(128, 64) == pytest.approx(128 * 3e-5 + 4e-7 * (64 + 128), rel=1e-3)
    assert fit.tokens_within(0.0054, 1000) == pytest.approx(100, abs=1)


def test_auto_preemption_swaps_where_moving_pages_costs_less_than_computing_them():
    for token_s, wanted in ((1e-3, True), (1e-6, False)):
        d = driver(
            depth=0, num_kv_pages=8, max_model_len=24, admission_watermark=0.0, num_host_pages=20, host_page_s=1e-4
        )
        for i in range(40):
            d.scheduler.step_time.observe(1 + i % 9, 10, token_s * (1 + i % 9))
        d.add("a", prompt(7), answer_of(16))
        d.add("b", prompt(7, seed=2), answer_of(16))
        d.run()
        counters = d.scheduler.counters
        assert counters.preemptions > 0 and (counters.swaps > 0) == wanted


def test_auto_preemption_swaps_a_long_context_and_computes_a_short_one_again():
    """Moving costs the same for each page; a chunk far into a prompt reads more than the first one did."""
    for length, wanted in ((7, 0), (100, 1)):
        d = driver(depth=0, max_num_batched_tokens=8, num_kv_pages=64, max_model_len=200, num_host_pages=64)
        d.scheduler.set_host_page_s(0.003)
        for i in range(200):
            tokens, context = 1 + i % 8, i * 37 % 200
            d.scheduler.step_time.observe(tokens, context, 1e-3 + 1e-3 * tokens + 1e-4 * context)
        d.add("a", prompt(length), answer_of(4))
        while not any(row.samples for row in d.step().rows):
            pass
        [sequence] = d.scheduler.roster.running.values()
        d.scheduler.preemption.preempt(sequence)
        assert d.scheduler.counters.swaps == wanted
        d.run()


def test_a_link_that_was_measured_counts_in_place_of_the_default():
    for measured_s, wanted in ((1e-6, True), (1.0, False)):
        d = driver(
            depth=0, num_kv_pages=8, max_model_len=24, admission_watermark=0.0, num_host_pages=20, host_page_s=1e-3
        )
        d.scheduler.set_host_page_s(measured_s)
        for i in range(40):
            d.scheduler.step_time.observe(1 + i % 9, 10, 1e-4 * (1 + i % 9))
        d.add("a", prompt(7), answer_of(16))
        d.add("b", prompt(7, seed=2), answer_of(16))
        d.run()
        assert d.scheduler.counters.preemptions > 0 and (d.scheduler.counters.swaps > 0) == wanted


def test_a_swap_that_host_memory_has_no_room_for_is_a_recompute():
    d = driver(depth=0, preemption="swap", num_host_pages=1, num_kv_pages=8, max_model_len=24, admission_watermark=0.0)
    d.add("a", prompt(7), answer_of(16))
    d.add("b", prompt(7, seed=2), answer_of(16))
    d.run()
    assert d.scheduler.counters.preemptions > 0 and d.scheduler.counters.swaps == 0


def test_pages_behind_the_window_serve_others():
    d = driver(depth=0, sliding_window=8, max_model_len=64, num_kv_pages=16)
    d.add("a", prompt(10), answer_of(50))
    peak = 0
    while d.step() is not None:
        peak = max(peak, d.scheduler.pool.num_used)
    assert peak <= 4, "a window of 8 lies in at most 3 pages of 4, and one is being filled"
    assert d.answers["a"] == answer_alone(prompt(10), answer_of(50), 64, window=8)


def test_guesses_that_agree_come_in_one_step():
    d = driver(depth=1, drafter=guess, num_draft_tokens=3)
    plain = driver(depth=1)
    for one in (d, plain):
        one.add("a", prompt(4), answer_of(30))
        one.run()
    assert d.answers["a"] == plain.answers["a"]
    counters = d.scheduler.counters
    assert 0 < counters.draft_tokens_accepted < counters.draft_tokens
    assert max(plan.num_drafts for plan in d.plans) == 3


def test_guesses_take_only_what_every_decode_and_the_pool_leave():
    d = driver(depth=0, drafter=guess, num_draft_tokens=8, max_num_batched_tokens=4, num_kv_pages=16)
    for name in "abc":
        d.add(name, prompt(2, seed=ord(name)), answer_of(20))
    d.run()
    full = [plan for plan in d.plans if plan.num_decodes == 3]
    assert full and all(plan.num_drafts <= 1 for plan in full)


def test_more_choices_than_places_are_refused_and_none_of_them_is_kept():
    d = driver(max_num_seqs=3)
    requests = [Request(request_id=f"{i}", prompt_token_ids=[1, 2], sampling=answer_of(2)) for i in range(4)]
    with pytest.raises(RequestError, match="n is 4, and at most 3") as error:
        d.scheduler.add_choices(requests)
    assert error.value.param == "n" and not d.scheduler.has_requests
    with pytest.raises(RequestError, match="different ids"):
        d.scheduler.add_choices([requests[0]] * 2)
    assert not d.scheduler.has_requests


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("priority", float("nan")),
        ("priority", "high"),
        ("priority", True),
        ("ttft_deadline_s", 0),
        ("ttft_deadline_s", "soon"),
        ("tenant", 3),
        ("cache_salt", "x" * 1001),
        ("arrival_s", float("inf")),
    ],
)
def test_a_field_that_makes_no_sense_is_refused_and_leaves_no_trace(field, value):
    d = driver()
    with pytest.raises(RequestError, match=field) as error:
        d.add("a", [1, 2], answer_of(2), **{field: value})
    assert error.value.param == field
    assert not d.scheduler.has_requests and d.scheduler.plan() is None


def test_what_the_pool_can_never_hold_is_refused_though_the_model_could():
    d = driver(num_kv_pages=4, page_size=4, max_model_len=64)
    for length, most, param in ((16, 1, "prompt"), (10, 7, "max_tokens")):
        with pytest.raises(RequestError, match="the KV cache holds 16 tokens") as error:
            d.add("a", prompt(length), answer_of(most))
        assert error.value.param == param
    d.add("a", prompt(10), SamplingParams(max_tokens=None, ignore_eos=True))
    d.run()
    assert len(d.answers["a"]) == 6


def test_pins_leave_room_for_the_longest_sequence():
    d = driver(num_kv_pages=18, max_model_len=64)
    d.add("a", prompt(16), answer_of(1))
    d.run()
    assert d.scheduler.prefixes.pin(prompt(8)) == 8
    with pytest.raises(RequestError, match="the longest sequence needs 16"):
        d.scheduler.prefixes.pin(prompt(16))
    d.scheduler.prefixes.unpin()
    assert d.scheduler.num_live_pages == 0


def test_the_next_turn_of_a_chat_finds_the_pages_of_an_answer_that_still_runs():
    d = driver(depth=0)
    d.add("a", prompt(6), answer_of(30))
    for _ in range(12):
        d.step()
    so_far = prompt(6) + d.answers["a"]
    d.add("b", [*so_far, 1, 2], answer_of(2))
    d.run()
    assert d.finished["b"].sequence.num_cached_tokens == (len(so_far) - 1) // 4 * 4 == 16
    assert d.answers["b"] == answer_alone([*so_far, 1, 2], answer_of(2), 64)
