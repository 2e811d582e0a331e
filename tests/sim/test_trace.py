import math

import numpy as np
import pytest

from jaxcb.errors import ConfigError
from jaxcb.sim.trace import WORKLOADS, Lcg, arrivals, uniform_lengths
from jaxcb.sim.traces import TRACES, make_trace


def test_the_lcg_gives_the_numbers_of_its_recurrence():
    state = (42 * 6364136223846793005 + 1442695040888963407) % 2**64
    assert Lcg(42).between(50, 1000) == 50 + (state >> 33) % 950 == 834
    assert uniform_lengths(3) == [(834, 726), (788, 943), (344, 116)]


def test_uniform_lengths_fill_their_ranges():
    prompts, outputs = zip(*uniform_lengths(5000), strict=True)
    assert (min(prompts), max(prompts), min(outputs), max(outputs)) == (50, 999, 10, 999)


@pytest.mark.parametrize("name", TRACES)
def test_a_seed_draws_the_same_trace_and_another_seed_another(name):
    first = make_trace(name, 50, rate=2.0, seed=1)
    assert first == make_trace(name, 50, rate=2.0, seed=1)
    assert first != make_trace(name, 50, rate=2.0, seed=2)


@pytest.mark.parametrize(
    ("name", "prompt_p50", "prompt_p90", "output_p50", "output_p90"),
    [
        ("sharegpt", 150, 796, 140, 555),
        ("azure-conv", math.exp(6.63), math.exp(6.63 + 1.2816 * 0.99), math.exp(5.02), math.exp(5.02 + 1.2816 * 0.86)),
        ("azure-code", math.exp(7.00), math.exp(7.00 + 1.2816 * 1.36), math.exp(2.79), math.exp(2.79 + 1.2816 * 0.85)),
    ],
)
def test_lengths_have_the_published_percentiles(name, prompt_p50, prompt_p90, output_p50, output_p90):
    trace = make_trace(name, 50_000)
    prompts = np.percentile([request.num_prompt_tokens for request in trace], (50, 90))
    outputs = np.percentile([request.num_output_tokens for request in trace], (50, 90))
    assert prompts == pytest.approx([prompt_p50, prompt_p90], rel=0.04)
    assert outputs == pytest.approx([output_p50, output_p90], rel=0.04)
    assert min(prompts) >= 1 and min(outputs) >= 1


@pytest.mark.parametrize(("gap_cv", "tolerance"), [(1.0, 0.03), (WORKLOADS["azure-conv"].gap_cv, 0.03), (5.0, 0.15)])
def test_arrivals_have_the_rate_and_the_burstiness_that_was_asked_for(gap_cv, tolerance):
    times = arrivals(50_000, rate=4.0, gap_cv=gap_cv, random=np.random.default_rng(0))
    gaps = np.diff(times)
    assert times[0] == 0.0 and (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(0.25, rel=tolerance)
    assert gaps.std() / gaps.mean() == pytest.approx(gap_cv, rel=tolerance)


def test_without_a_rate_all_requests_are_there_at_the_start():
    assert {request.arrival_s for request in make_trace("sharegpt", 20)} == {0.0}


@pytest.mark.parametrize(
    ("name", "count", "rate", "param"),
    [
        ("nothing", 1, 1.0, "trace"),
        ("uniform", 0, 1.0, "num_requests"),
        ("uniform", 1, 0.0, "rate"),
        ("uniform", 1, -1.0, "rate"),
        ("uniform", 1, math.nan, "rate"),
    ],
)
def test_what_cannot_be_drawn_is_refused(name, count, rate, param):
    with pytest.raises(ConfigError) as error:
        make_trace(name, count, rate=rate)
    assert error.value.param == param
