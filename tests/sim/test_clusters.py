"""Several engines under one clock: equal ones, and separate pools for prefill and decode."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcb.errors import ConfigError
from jaxcb.sim import (
    GPUS,
    MODELS,
    Limits,
    Machine,
    ReplicaSpec,
    Simulation,
    TraceRequest,
    compare,
    make_trace,
    simulate,
)
from jaxcb.sim.clusters import StaticPadding, cluster_of
from jaxcb.sim.disaggregated import STORE_BLOCK_TOKENS, Disaggregated, Network, Store, store_blocks
from jaxcb.sim.simulator import run
from tests.scheduler.fake_device import limits
from tests.sim.runs import MS

TWO_H100 = Machine(model=MODELS["8b"], gpu=GPUS["h100"], num_gpus=2)
WIRE = Network(bytes_per_token=1000, bandwidth=1e6, latency_s=0.0)
"""A millisecond a token."""


def specs(count, **changes):
    return [ReplicaSpec(limits=limits(**changes), step_time=MS, run_ahead=False)] * count


def pools(num_prefill, num_decode, **changes):
    (spec,) = specs(1, **changes)
    return [spec] * num_prefill + [dataclasses.replace(spec, continues=True)] * num_decode


def finished(simulation):
    run(simulation)
    return simulation.result()


def times_ms(result):
    return [(round(record.first_token_s * 1e3, 6), round(record.finished_s * 1e3, 6)) for record in result.requests]


def test_equal_engines_share_the_requests():
    trace = [TraceRequest(0.0, 3, 10)] * 8
    alone = simulate(limits(), trace, MS, run_ahead=False)
    together = finished(Simulation(specs(2), trace))
    assert alone.duration_s == pytest.approx(0.020) and together.duration_s == pytest.approx(0.010)
    assert together.num_output_tokens == alone.num_output_tokens == 80


def test_an_engine_alone_and_a_cluster_of_one_are_the_same():
    trace = make_trace("uniform", 40, rate=100.0)
    one = simulate(limits(max_model_len=2000, num_kv_pages=2000), trace, MS, run_ahead=False)
    cluster = finished(Simulation(specs(1, max_model_len=2000, num_kv_pages=2000), trace))
    assert times_ms(one) == times_ms(cluster)


def test_kv_travels_between_the_first_and_the_second_token():
    # 1 ms of prefill, 7 ms on the wire for 7 tokens, then a token a millisecond.
    simulation = Simulation(pools(1, 1), [TraceRequest(0.0, 7, 4)], Disaggregated(1, WIRE))
    result = finished(simulation)
    assert times_ms(result) == [(1.0, 1.0 + 7.0 + 3.0)]
    assert [round(gap * 1e3, 6) for gap in result.gaps_s] == [8.0, 1.0, 1.0]
    prefill, decode = simulation.replicas
    assert (prefill.usage.num_steps, prefill.usage.num_step_tokens) == (1, 7)
    # Pages of 4: one full page arrives, the other three tokens and the answer's first are computed there.
    assert (decode.usage.num_steps, decode.usage.num_step_tokens) == (3, 4 + 2)
    assert result.num_prompt_tokens == 7 and result.num_cached_tokens == 0 and result.requests[0].num_generated == 4


def test_an_answer_of_one_token_needs_no_decode_card():
    simulation = Simulation(pools(1, 1), [TraceRequest(0.0, 7, 1)], Disaggregated(1, WIRE))
    assert times_ms(finished(simulation)) == [(1.0, 1.0)]
    assert simulation.replicas[1].usage.num_steps == 0


def test_transfers_to_a_card_go_one_after_the_other():
    trace = [TraceRequest(0.0, 8, 3)] * 2
    one, two = times_ms(finished(Simulation(pools(1, 1), trace, Disaggregated(1, WIRE))))
    assert two[1] - one[1] == pytest.approx(8.0)
    one, two = times_ms(finished(Simulation(pools(1, 2), trace, Disaggregated(1, WIRE))))
    assert one[1] == pytest.approx(two[1])


def test_a_decode_card_without_room_pulls_later():
    # A card with one place: the second request's KV stays where it is until the first has ended.
    small = [*pools(1, 0), *pools(0, 1, max_num_seqs=1)]
    one, two = times_ms(finished(Simulation(small, [TraceRequest(0.0, 8, 6)] * 2, Disaggregated(1, WIRE))))
    assert two[1] == pytest.approx(one[1] + 8.0 + 5.0)


def test_kv_that_does_not_fit_a_decode_card_waits_instead_of_being_computed_there():
    # 41 tokens take 11 of the 16 pages: the second prompt's KV comes when the first has ended, and none is lost.
    simulation = Simulation(pools(1, 1, num_kv_pages=16), [TraceRequest(0.0, 40, 10)] * 2, Disaggregated(1, WIRE))
    one, two = times_ms(finished(simulation))
    assert two[1] == pytest.approx(one[1] + 40.0 + 9.0)
    assert simulation.replicas[1].usage.num_step_tokens == 2 * 9


def test_a_prompt_that_would_come_too_late_is_turned_away_and_the_others_are_not_late():
    trace = [TraceRequest(0.0, 16, 2)] * 10
    everyone = finished(Simulation(pools(1, 1), trace, Disaggregated(1, WIRE)))
    in_time = finished(Simulation(pools(1, 1), trace, Disaggregated(1, WIRE, ttft_limit_s=4.5e-3)))
    assert everyone.num_rejected == 0 and everyone.ttft.max == pytest.approx(10e-3)
    assert in_time.num_rejected == 6 and in_time.ttft.max == pytest.approx(4e-3)
    assert all(record.finished_s is None for record in in_time.requests if record.rejected)


def test_a_stored_prefix_is_fetched_instead_of_computed():
    size = STORE_BLOCK_TOKENS
    roomy = {"max_model_len": 4 * size, "num_kv_pages": 4 * size, "max_num_batched_tokens": size, "page_size": 4}
    fast = Network(bytes_per_token=1, bandwidth=1e9, latency_s=0.0)
    content = ((1, 2 * size),)
    trace = [TraceRequest(0.0, 2 * size + 9, 2, content), TraceRequest(1.0, 2 * size + 5, 2, content)]
    with_store = Simulation(pools(1, 1, **roomy), trace, Disaggregated(1, fast, store=Store(100)))
    result = finished(with_store)
    assert [record.num_cached_tokens for record in result.requests] == [0, 2 * size]
    assert result.requests[1].ttft_s < result.requests[0].ttft_s


def test_the_store_forgets_what_was_used_least_recently_leaves_first():
    store = Store(3)
    store.put([1, 2])
    store.put([5])
    assert store.match([1]) == STORE_BLOCK_TOKENS
    store.put([6])
    assert store.match([1, 2]) == STORE_BLOCK_TOKENS and store.match([5]) == store.match([6]) == STORE_BLOCK_TOKENS


def test_blocks_of_the_store_stand_for_all_that_is_before_them():
    size = STORE_BLOCK_TOKENS
    one = store_blocks(0, TraceRequest(0.0, 3 * size - 1, 1, ((1, size), (2, size))))
    two = store_blocks(1, TraceRequest(0.0, 2 * size, 1, ((3, size), (2, size))))
    same = store_blocks(2, TraceRequest(0.0, 2 * size, 1, ((1, size), (2, size))))
    assert len(one) == 2 and one == same and not set(one) & set(two)


request = st.tuples(st.floats(0.0, 0.05), st.integers(1, 40), st.integers(1, 20))


@settings(max_examples=60, deadline=None)
@given(
    trace=st.lists(request, min_size=1, max_size=15),
    num_prefill=st.integers(1, 2),
    num_decode=st.integers(1, 2),
    seqs=st.integers(1, 4),
    pages=st.integers(16, 24),
    run_ahead=st.booleans(),
)
def test_every_request_of_a_cluster_gets_its_tokens_once_and_in_order(
    trace, num_prefill, num_decode, seqs, pages, run_ahead
):
    spec = ReplicaSpec(limits=limits(max_num_seqs=seqs, num_kv_pages=pages), step_time=MS, run_ahead=run_ahead)
    ordered = [TraceRequest(*values) for values in sorted(trace)]
    simulation = Simulation([spec] * (num_prefill + num_decode), ordered, Disaggregated(num_prefill, WIRE))
    result = finished(simulation)
    assert simulation.num_done == len(trace)
    for record in result.requests:
        assert record.num_generated == record.num_output_tokens
        assert record.arrival_s < record.first_token_s <= record.finished_s == record.last_token_s
    assert result.gap_counts.sum() == sum(record.num_output_tokens - 1 for record in result.requests)
    for replica in simulation.replicas:
        assert replica.scheduler.num_live_pages == replica.num_open == replica.num_open_tokens == 0
        replica.scheduler.check()


def test_a_static_batch_computes_its_padding():
    def at_once(padding):
        static = limits(batching="static", max_num_batched_tokens=64, enable_prefix_caching=False)
        tokens = []
        counted = dataclasses.replace(
            ReplicaSpec(limits=static, step_time=MS, run_ahead=False),
            padding=lambda plan: tokens.append(padding(plan)) or tokens[-1],
        )
        run(Simulation([counted], [TraceRequest(0.0, 5, 2), TraceRequest(0.0, 9, 4), TraceRequest(0.0, 3, 1)]))
        return tokens

    # Three prompts as long as the longest; then three rows until the last has ended, though two and one are left.
    assert at_once(StaticPadding()) == [3 * 9, 3, 3, 3]
    assert at_once(lambda plan: plan.num_tokens) == [17, 2, 1, 1]


def test_compare_runs_every_system_on_the_same_trace_and_cards():
    trace = make_trace("sharegpt", 30, rate=5.0)
    names = ["orca", "vllm-v1", "distserve", "splitwise", "mooncake"]
    rows = compare(names, trace, TWO_H100, limits=Limits(ttft_s=1.0, tpot_s=0.05))
    assert [row.name for row in rows] == names
    wanted = sum(request.num_output_tokens for request in trace)
    assert all(row.result.num_output_tokens == wanted for row in rows)
    orca, vllm, distserve, splitwise, _ = rows
    assert orca.result.kv_waste > 0.8 > 0.1 > vllm.result.kv_waste
    assert orca.good_part == 1.0 and orca.goodput == pytest.approx(30 / orca.result.duration_s)
    assert vllm.usd_per_hour == 2 * 4.75 and splitwise.usd_per_hour == pytest.approx(4.75 + 2.2)
    assert splitwise.watts == 1100 and splitwise.result.tpot.p50 > distserve.result.tpot.p50


def test_a_price_that_is_not_known_is_left_out():
    h200 = Machine(model=MODELS["8b"], gpu=GPUS["h200"])
    (row,) = compare(["vllm-v1"], make_trace("sharegpt", 3), h200)
    assert row.usd_per_million_tokens is None and row.summary()["usd_per_million_tokens"] is None


def test_separate_pools_need_two_cards():
    with pytest.raises(ConfigError, match="at least 2 GPUs"):
        cluster_of("distserve", dataclasses.replace(TWO_H100, num_gpus=1))


def test_compare_without_a_machine_takes_two_h100():
    (row,) = compare(["sarathi"], make_trace("sharegpt", 3))
    assert row.usd_per_hour == 2 * 4.75 and len(row.result.finished) == 3
