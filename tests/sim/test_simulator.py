"""The real Scheduler under the virtual clock. Times are in milliseconds: every step takes one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcb.errors import ConfigError
from jaxcb.sim import LinearStepTime, TraceRequest, one_engine, simulate
from tests.scheduler.fake_device import limits
from tests.sim.runs import MS


def times_ms(result):
    return [(record.first_token_s * 1e3, record.finished_s * 1e3) for record in result.requests]


@pytest.mark.parametrize(
    ("run_ahead", "second"),
    # Without run-ahead, b joins the step that starts at 1 ms. With it, that step was planned at 0, before b came.
    [(False, (2.0, 2.0)), (True, (3.0, 3.0))],
)
def test_a_request_joins_the_first_step_that_is_planned_after_its_arrival(run_ahead, second):
    trace = [TraceRequest(0.0, 3, 2), TraceRequest(0.5e-3, 2, 1)]
    result = simulate(limits(), trace, MS, run_ahead=run_ahead)
    assert times_ms(result) == [pytest.approx((1.0, 2.0)), pytest.approx(second)]
    assert result.ttft.max * 1e3 == pytest.approx(second[0] - 0.5)


def test_the_clock_jumps_over_idle_time():
    result = simulate(limits(), [TraceRequest(0.0, 3, 1), TraceRequest(10.0, 3, 1)], MS)
    assert times_ms(result) == [pytest.approx((1.0, 1.0)), pytest.approx((10_001.0, 10_001.0))]
    assert result.duration_s == pytest.approx(10.001) and result.busy_s == pytest.approx(0.002)
    assert result.requests_per_s == pytest.approx(2 / 10.001)


def test_running_ahead_leaves_no_gap_between_steps():
    for run_ahead in (False, True):
        result = simulate(limits(), [TraceRequest(0.0, 20, 30)], MS, run_ahead=run_ahead)
        assert result.num_steps == 2 + 29 and result.duration_s == pytest.approx(0.031)


def test_gaps_between_tokens_are_those_of_the_steps():
    # A step takes 1 ms a token. a decodes alone, then beside b's chunks of 15 and 5 tokens, then beside b.
    trace = [TraceRequest(0.0, 4, 6), TraceRequest(4.5e-3, 20, 2)]
    result = simulate(limits(), trace, LinearStepTime(fixed_ms=0.0, per_token_ms=1.0), run_ahead=False)
    gaps = [(round(gap * 1e3, 6), count) for gap, count in zip(result.gaps_s, result.gap_counts, strict=True)]
    assert gaps == [(1.0, 1), (16.0, 1), (6.0, 1), (2.0, 2), (1.0, 1)]
    assert result.itl.max * 1e3 == pytest.approx(16.0) and result.itl.p50 * 1e3 == pytest.approx(2.0)
    assert result.tpot.max * 1e3 == pytest.approx((1 + 16 + 6 + 2 + 1) / 5)


def test_a_request_that_can_never_run_is_refused_and_the_others_go_on():
    result = simulate(limits(), [TraceRequest(0.0, 60, 5), TraceRequest(0.0, 60, 4)], MS)
    assert [record.refused for record in result.requests] == [True, False]
    assert result.num_refused == 1 and len(result.finished) == 1 and result.num_output_tokens == 4


def test_use_of_the_kv_cache_and_of_the_steps():
    # Two steps: a prompt of 7 tokens takes 2 pages of 4 (room for its answer), its second token fits the same two.
    result = simulate(limits(num_kv_pages=16, enable_prefix_caching=False), [TraceRequest(0.0, 7, 2)], MS)
    assert result.mean_kv_use == result.peak_kv_use == 2 / 16
    assert (result.num_steps, result.num_step_tokens, result.mean_running) == (2, 8, 1.0)


@pytest.mark.parametrize("length", [8, 9])
def test_equal_dummy_prompts_are_not_shared_by_accident(length):
    result = simulate(limits(), [TraceRequest(float(i), length, 12) for i in range(5)], MS)
    assert result.num_cached_tokens == 0 and all(record.num_cached_tokens == 0 for record in result.requests)


def test_with_prefix_caching_a_preempted_request_finds_its_own_pages():
    tokens = {}
    for caching in (False, True):
        tight = limits(num_kv_pages=16, enable_prefix_caching=caching, admission_watermark=0.0)
        result = simulate(tight, [TraceRequest(0.0, 15, 45), TraceRequest(0.0, 15, 45)], MS, run_ahead=False)
        assert result.num_preemptions > 0
        tokens[caching] = result.num_step_tokens
    assert tokens[True] < tokens[False]


request = st.tuples(st.floats(0.0, 0.02), st.integers(1, 40), st.integers(1, 24))


@settings(max_examples=150, deadline=None)
@given(
    trace=st.lists(request, min_size=1, max_size=12),
    run_ahead=st.booleans(),
    num_seqs=st.integers(1, 4),
    budget=st.sampled_from([4, 16, 64]),
    spare_pages=st.integers(0, 8),
    caching=st.booleans(),
)
def test_tokens_come_out_as_asked_for_and_in_order(trace, run_ahead, num_seqs, budget, spare_pages, caching):
    simulation = one_engine(
        limits(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=budget,
            num_kv_pages=16 + spare_pages,
            enable_prefix_caching=caching,
        ),
        [TraceRequest(*values) for values in sorted(trace)],
        LinearStepTime(),
        run_ahead=run_ahead,
    )
    while simulation.step():
        pass
    result = simulation.result()
    for record in result.requests:
        assert record.num_generated == record.num_output_tokens
        assert record.arrival_s < record.first_token_s <= record.finished_s == record.last_token_s
    assert result.num_output_tokens == sum(record.num_output_tokens for record in result.requests)
    assert result.gap_counts.sum() == sum(record.num_output_tokens - 1 for record in result.requests)
    assert (result.gaps_s * result.gap_counts).sum() == pytest.approx(
        sum(record.finished_s - record.first_token_s for record in result.requests)
    )
    least = sum(record.num_prompt_tokens + record.num_output_tokens - 1 for record in result.requests)
    assert caching or result.num_step_tokens >= least
    assert result.busy_s <= result.duration_s + 1e-9
    assert simulation.num_done == len(trace)
    assert simulation.scheduler.num_live_pages == 0
    simulation.scheduler.check()


def test_a_trace_out_of_order_is_refused():
    with pytest.raises(ConfigError, match="request 1 arrives at 1"):
        simulate(limits(), [TraceRequest(2.0, 1, 1), TraceRequest(1.0, 1, 1)], MS)


def test_a_context_that_the_pages_cannot_hold_is_refused():
    with pytest.raises(ConfigError, match="15 pages of 4 tokens"):
        simulate(limits(num_kv_pages=15), [TraceRequest(0.0, 1, 1)], MS)


def test_an_empty_trace_has_an_empty_result():
    summary = simulate(limits(), [], MS).summary()
    assert summary["num_steps"] == 0 and summary["output_tokens_per_s"] == 0.0 and summary["itl_s"] is None


def test_a_target_for_the_time_between_tokens_is_held_by_what_the_scheduler_learns_of_the_steps():
    # 2 ms and 0.1 ms a token: beside 8 decodes a step of 10 ms has room for 72 prompt tokens.
    step_time = LinearStepTime(fixed_ms=2.0, per_token_ms=0.1)
    roomy = {"max_num_seqs": 16, "max_num_batched_tokens": 1024, "max_model_len": 2048, "num_kv_pages": 8192}
    trace = [TraceRequest(0.0, 10, 600)] * 8 + [TraceRequest(0.3 + 0.15 * i, 1000, 5) for i in range(12)]
    worst_ms = {
        target: simulate(limits(**roomy, itl_target_ms=target), trace, step_time, run_ahead=False).itl.p99 * 1e3
        for target in (None, 10.0)
    }
    assert worst_ms[None] == pytest.approx(2 + 0.1 * 1008, rel=0.02)
    assert worst_ms[10.0] <= 10.5


def test_swapping_costs_the_pages_on_the_link():
    # Both need 15 pages in the end and the pool has 16: one gives way. Its pages go out and come back, 0.5 ms each.
    settings = {"num_kv_pages": 16, "enable_prefix_caching": False, "admission_watermark": 0.0}
    trace = [TraceRequest(0.0, 15, 45)] * 2
    swapping = limits(**settings, preemption="swap", num_host_pages=64, host_page_s=0.5e-3)
    swapped = simulate(swapping, trace, MS, run_ahead=False)
    recomputed = simulate(limits(**settings, preemption="recompute"), trace, MS, run_ahead=False)
    assert swapped.num_preemptions == recomputed.num_preemptions == 1
    assert swapped.num_step_tokens == 2 * (15 + 44) < recomputed.num_step_tokens
    moved_s = swapped.busy_s - swapped.num_steps * 1e-3
    assert moved_s > 0 and round(moved_s / 0.5e-3, 6) == int(moved_s / 0.5e-3 + 0.5)
