"""A model on several cards, as the planner sees it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxcb.config import EngineConfig
from jaxcb.errors import ConfigError
from jaxcb.plan import Capacity, Workload
from jaxcb.plan.__main__ import main
from jaxcb.plan.shapes import Apart, Replicated, shapes_of
from jaxcb.sim import GPUS, MODELS, StepLoad, TraceRequest
from jaxcb.sim.disaggregated import Disaggregated, Network
from jaxcb.sim.replica import ReplicaSpec
from jaxcb.sim.simulator import Simulation
from jaxcb.sim.step_time import SUM_LATENCY_S
from jaxcb.sim.trace import arrivals

CHAT = Workload(prompt=1200, output=200)


def capacity(model: str = "8b", size: int = 1) -> Capacity:
    return Capacity(MODELS[model], GPUS["h200"], EngineConfig(tensor_parallel_size=size))


def shapes(model: str, num_gpus: int):
    return shapes_of(MODELS[model], GPUS["h200"], num_gpus, CHAT, EngineConfig())


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_a_card_has_its_part_of_a_model(size):
    whole, part = MODELS["8b"], MODELS["8b"].part(size)
    assert part.num_params == -(-whole.num_params // size) and part.q_size == 4096 // size
    assert part.kv_size == max(1024 // size, 128), "no less than a head"
    assert MODELS["8x7b"].part(2).num_active_params == pytest.approx(MODELS["8x7b"].num_active_params / 2)


@pytest.mark.parametrize("size", [3, 64])
def test_heads_that_do_not_divide_are_refused_with_their_numbers(size):
    with pytest.raises(ConfigError, match=rf"the 32 heads of Llama-3.1-8B, .* 8 KV heads .* got {size}") as error:
        capacity(size=size)
    assert error.value.param == "tensor_parallel_size"


def test_a_step_of_a_cut_model_is_a_part_of_the_work_and_its_sums():
    load = StepLoad(300, 20_000, 500_000)
    one, two = (capacity(size=size).step_time for size in (1, 2))
    halved = dataclasses.replace(two, sum_s_per_token=0.0, overhead_s=one.overhead_s)
    assert halved.step_s(load) - one.overhead_s == pytest.approx((one.step_s(load) - one.overhead_s) / 2)
    sums_s = two.step_s(load) - halved.step_s(load)
    assert sums_s == pytest.approx(65 * (SUM_LATENCY_S + 300 * 4096 * 2 / (450e9 * 0.85)))


def test_cards_that_share_a_model_hold_more_than_twice_the_kv_of_one():
    one, two = capacity().num_kv_tokens, capacity(size=2).num_kv_tokens
    assert two == pytest.approx(2 * one + 16.1e9 / 131_072, rel=0.01), "the weights are held once"


def test_every_way_to_use_the_cards_is_there():
    assert list(shapes("8b", 1)) == ["one card"]
    names = list(shapes("8b", 4))
    assert names[:4] == ["one card", "tp 4", "dp 2 x tp 2", "dp 4"]
    assert [name.split(", each")[-1] for name in names[4:]] == [names[4], " tp 2"]
    found = shapes("70b", 2)
    assert isinstance(found["one card"], ConfigError) and isinstance(found["dp 2"], ConfigError)
    assert isinstance(found["tp 2"], Replicated)
    assert not any(isinstance(shape, Apart) for shape in found.values())


def test_replicas_serve_as_many_times_what_one_does():
    engine = capacity()
    two = Replicated(engine, 2)
    assert two.most_requests_per_s(CHAT) == 2 * engine.most_requests_per_s(CHAT)
    assert two.at_rate(16.0, CHAT).itl_s == engine.at_rate(8.0, CHAT).itl_s


def test_the_split_is_the_one_that_serves_most():
    [best] = [shape for name, shape in shapes("8b", 4).items() if name.startswith("prefill") and "tp" not in name]
    assert isinstance(best, Apart) and best.num_prefill + best.num_decode == 4
    for num_prefill in (1, 2, 3):
        other = Apart(best.engine, num_prefill, 4 - num_prefill)
        assert other.most_requests_per_s(CHAT) <= best.most_requests_per_s(CHAT)


def test_prompts_apart_leave_the_gaps_between_tokens_alone():
    apart, both = Apart(capacity(), 1, 1), Replicated(capacity(), 2)
    ours, theirs = apart.at_rate(15.0, CHAT), both.at_rate(15.0, CHAT)
    assert ours.longest_gap_s == ours.itl_s < theirs.itl_s < theirs.longest_gap_s
    assert apart.most_requests_per_s(CHAT) < both.most_requests_per_s(CHAT)


def test_times_apart_are_near_those_of_the_simulated_schedulers():
    engine, rate = capacity(), 12.0
    spec = ReplicaSpec(limits=engine.limits, step_time=engine.step_time)
    random = np.random.default_rng(1)
    trace = [TraceRequest(time, 1200, 200) for time in arrivals(500, rate=rate, gap_cv=1.0, random=random)]
    network = Network(bytes_per_token=engine.kv_bytes_per_token, bandwidth=450e9, latency_s=0.0)
    simulation = Simulation((spec, dataclasses.replace(spec, continues=True)), trace, Disaggregated(1, network))
    while simulation.step():
        pass
    result, times = simulation.result(), Apart(engine, 1, 1).at_rate(rate, CHAT)
    assert result.tpot is not None and result.ttft is not None
    assert times.itl_s == pytest.approx(result.tpot.mean, rel=0.15)
    assert times.ttft_s == pytest.approx(result.ttft.mean, rel=0.35)


def test_the_commands_print_the_cards_together(capsys):
    assert main(["shapes", "--model", "70b", "--gpu", "h200", "--num-gpus", "4", "--rate", "4"]) == 0
    out = capsys.readouterr().out
    assert "4 x H200" in out and "ms at 4 req/s" in out and "one card, dp 4: the model is larger" in out
    assert all(len(line) <= 100 for line in out.splitlines())
    assert main(["--model", "70b", "--gpu", "h200", "--tensor-parallel-size", "2"]) == 0
    assert "on 2 x H200" in (out := capsys.readouterr().out) and "70.6 GB of 141 GB on each" in out
    assert main(["shapes", "--rate", "1000"]) == 0
    assert capsys.readouterr().out.count("the queue grows") == 4
    assert main(["--model", "8b", "-tp", "3"]) == 1
    assert "got 3" in capsys.readouterr().err
