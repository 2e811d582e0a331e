import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

from jaxcb.config import EngineConfig
from jaxcb.errors import ConfigError, ModelError
from jaxcb.plan import Capacity, Workload, find_model
from jaxcb.plan.__main__ import main
from jaxcb.sim import GPUS, MODELS, StepLoad, TraceRequest, simulate
from jaxcb.sim.trace import arrivals, closed_loop

CHAT = Workload(prompt=800, output=200)


def capacity(model="8b", gpu="h100", **config):
    return Capacity(MODELS[model], GPUS[gpu], EngineConfig(**config))


def with_32_decodes(tokens):
    chunk = tokens - 32
    return StepLoad(tokens, 32 * 900 + chunk, 32 * 900 + chunk * (chunk + 1) // 2)


def test_memory_leaves_room_for_so_many_requests():
    plan = capacity()
    assert plan.num_kv_tokens == plan.limits.num_kv_pages * 16
    assert plan.most_requests(900) == plan.num_kv_tokens // 900
    assert plan.most_at_once(CHAT) == min(256, plan.num_kv_tokens // 900)
    assert capacity(max_num_seqs=7).most_at_once(CHAT) == 7


def test_throughput_grows_with_the_batch_and_stops_at_the_knee():
    plan = capacity(max_num_seqs=1024)
    points = [plan.at_batch(size, CHAT) for size in (1, 16, 128, 256, 512)]
    rates = [point.decode_tokens_per_s for point in points]
    assert rates[1] > 14 * rates[0] and rates[4] < 2 * rates[3]
    assert all(point.tokens_per_s <= point.decode_tokens_per_s for point in points)
    # An H100 at 60% and 85% of its peaks: 989e12 * 0.6 / (3.35e12 * 0.85) FLOP a byte, and 1 FLOP a byte of weights.
    assert plan.step_time.knee_tokens == pytest.approx(208.4, abs=0.1)


@pytest.mark.parametrize("users", [4, 32, 128])
def test_the_throughput_of_a_batch_is_that_of_the_simulated_scheduler(users):
    plan = capacity(max_num_seqs=128)
    trace = closed_loop([TraceRequest(0.0, 800, 200)] * (6 * users), users)
    # Staggered, or all prompts would come at once: each user's first answer is shorter or longer than the next user's.
    trace = [
        request._replace(num_output_tokens=1 + 200 * i // users) if i < users else request
        for i, request in enumerate(trace)
    ]
    result = simulate(plan.limits, trace, plan.step_time)
    assert result.output_tokens_per_s == pytest.approx(plan.at_batch(users, CHAT).tokens_per_s, rel=0.1)


def test_times_at_a_rate_are_near_those_of_the_simulated_scheduler():
    plan = capacity()
    times = arrivals(600, rate=8.0, gap_cv=1.0, random=np.random.default_rng(1))
    result = simulate(plan.limits, [TraceRequest(time, 800, 200) for time in times], plan.step_time)
    point = plan.at_rate(8.0, CHAT)
    assert point.utilization < 1
    assert point.itl_s == pytest.approx(result.itl.mean, rel=0.15)
    assert point.ttft_s == pytest.approx(result.ttft.mean, rel=0.35)


def test_past_the_most_that_is_possible_the_utilization_says_so():
    plan = capacity()
    assert plan.at_rate(2 * plan.most_requests_per_s(CHAT), CHAT).utilization == pytest.approx(2)


def test_the_largest_budget_is_the_last_that_holds_the_limit():
    plan = capacity()
    budget = plan.largest_budget(30e-3, 32, 900)
    beyond = plan.largest_budget(30.001e-3, 32, 900)
    assert 32 < budget <= beyond <= budget + 1

    step_time = plan.step_time
    assert step_time.step_s(with_32_decodes(budget)) <= 30e-3 < step_time.step_s(with_32_decodes(budget + 1))
    with pytest.raises(ConfigError, match="no budget holds 5 ms between tokens: 32 decodes at 900 tokens take"):
        plan.largest_budget(5e-3, 32, 900)


def test_swapping_is_bytes_over_the_link_and_recomputing_flops():
    plan = capacity()
    assert plan.swap_s(4096) == pytest.approx(4096 * 131_072 / 64e9)
    assert plan.recompute_s(4096) == pytest.approx(4096 * 2 * 8.03e9 / (989e12 * 0.6), rel=0.1)


def test_a_model_that_is_too_large_and_a_request_that_never_fits_are_refused():
    with pytest.raises(ConfigError, match="larger than the card"):
        capacity("70b", "h100")
    with pytest.raises(ConfigError, match="no request of 50,000 tokens fits"):
        capacity("8b", "l4").most_at_once(Workload(49_999, 2))


def test_a_model_is_found_by_key_by_name_and_by_config(tmp_path):
    assert find_model("8b") == find_model("llama-3.1-8b") == MODELS["8b"]
    config = {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "config.json"):
        assert dataclasses.replace(find_model(str(path)), name="Llama-3.1-8B") == MODELS["8b"]
    experts = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    small = {"vocab_size": 32000, "max_position_embeddings": 32768}
    (tmp_path / "config.json").write_text(json.dumps(config | experts | small))
    assert dataclasses.replace(find_model(str(tmp_path)), name="Mixtral-8x7B") == MODELS["8x7b"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    with pytest.raises(ModelError, match="'mamba' is not supported"):
        find_model(str(tmp_path))
    with pytest.raises(ConfigError, match=r"model must be one of 135m, .* got 'gpt-9'"):
        find_model("gpt-9")


def test_the_command_prints_a_plan(capsys):
    assert main(["--gpu", "h100", "--rate", "10", "--itl-ms", "50", "--lengths", "1,3", "--max-num-seqs", "64"]) == 0
    out = capsys.readouterr().out
    for text in ("weights        16.1 GB of 80 GB", "KV cache       131.1 KB a token", "roofline knee  208 tokens"):
        assert text in out
    assert "ITL 50 ms" in out and "at 10 req/s" in out and "utilization 66.7%" in out
    sizes = [line.split()[0] for line in out.splitlines() if line[:7].strip().isdigit()]
    assert sizes == ["1", "2", "4", "8", "16", "32", "64"]


def test_a_rate_that_is_too_high_is_said(capsys):
    assert main(["--rate", "1000", "--gpu", "l4"]) == 0
    assert "the queue grows without end" in capsys.readouterr().out


def test_importing_the_planner_leaves_jax_out():
    code = "import sys, jaxcb.plan.__main__; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
