"""The heart of the suite: a request's answer doesn't depend on what shares the batch, nor on how it was scheduled."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
import pytest

from jaxcb.config import Backend
from jaxcb.engine import Engine
from jaxcb.request import SamplingParams
from tests.engine.conftest import SPEC, sensitive_params
from tests.engine.run import complete, prompts_that_share_beginnings

NUM_PROMPTS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=["xla", pytest.param("native", marks=pytest.mark.native)])
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.param


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """24 prompts of 1 to 600 tokens; every third begins like the one before it."""
    return prompts_that_share_beginnings(
        [1, 2, 15, 16, 17, 600], NUM_PROMPTS, SPEC.vocab_size, log_mean=4.0, log_sigma=1.2, longest=600, seed=11
    )


@pytest.fixture(scope="module")
def lonely(make_engines) -> Engine:
    """One sequence, whole prompt in one step, no prefix cache, no running ahead."""
    return make_engines(
        max_num_seqs=1, max_num_batched_tokens=640, num_kv_pages=64, enable_prefix_caching=False, run_ahead=False
    )


@pytest.fixture(scope="module")
def alone(prompts, lonely) -> list[list[int]]:
    """The answer to each prompt by itself."""
    answers = [list(complete(lonely, [prompt], GREEDY)[0].token_ids) for prompt in prompts]
    assert np.mean([len(set(answer)) for answer in answers]) > 8, "it repeats itself: equal answers would mean nothing"
    assert len({tuple(answer) for answer in answers}) > NUM_PROMPTS / 2
    return answers


CROSSINGS = {
    "all_together": {"max_num_seqs": 24, "max_num_batched_tokens": 512},
    "budget_17": {"max_num_batched_tokens": 17},
    "budget_512": {"max_num_batched_tokens": 512},
    "preemption": {"num_kv_pages": 60, "admission_watermark": 0.0},
    "no_prefix_cache": {"enable_prefix_caching": False},
    "no_run_ahead": {"run_ahead": False},
    "preemption_no_run_ahead": {"num_kv_pages": 60, "admission_watermark": 0.0, "run_ahead": False},
    "pages_of_64": {"page_size": 64, "num_kv_pages": 100},
    "pages_of_8": {"page_size": 8, "num_kv_pages": 800},
    "many_buckets": {"decode_buckets": (2,), "mixed_buckets": (32,)},
}


SHORT = ("all_together", "budget_17", "preemption", "pages_of_64")
"""What xla always runs; on a CPU it compiles for longer than it computes, and the rest of it is slow."""


def on_both_backends(name: str, values: Iterable[object], short: Collection[object]) -> pytest.MarkDecorator:
    """Parametrizes a test: all values on the native kernels, on xla the short form (the others are slow tests)."""
    cases = [pytest.param("native", value, marks=pytest.mark.native) for value in values]
    cases += [pytest.param("xla", value, marks=() if value in short else pytest.mark.slow) for value in values]
    return pytest.mark.parametrize(("backend", name), cases, indirect=["backend"], scope="module")


@on_both_backends("crossing", CROSSINGS, SHORT)
def test_tokens_are_those_of_the_request_alone(crossing, prompts, alone, make_engine):
    engine = make_engine(**CROSSINGS[crossing])
    outputs = complete(engine, prompts, GREEDY)
    assert [list(output.token_ids) for output in outputs] == alone
    stats = engine.stats()
    if "preemption" in crossing:
        assert stats.preemptions > 0
    if crossing == "all_together":
        assert sum(output.num_cached_tokens for output in outputs) == stats.prompt_tokens_cached
        assert [output.token_ids for output in complete(engine, prompts[::-1], GREEDY)] == alone[::-1]
    assert (stats.num_running, stats.num_waiting, stats.kv_pages_used) == (0, 0, 0)


def test_a_second_round_comes_out_of_the_prefix_cache_and_is_the_same(prompts, alone, make_engine):
    engine = make_engine()
    for _ in range(2):
        outputs = complete(engine, prompts, GREEDY)
        assert [list(output.token_ids) for output in outputs] == alone
    assert [output.num_cached_tokens for output in outputs] == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]


def test_a_seeded_sample_is_the_same_in_any_company(prompts, lonely, make_engine):
    seeded = [
        SamplingParams(temperature=0.9, top_k=20 * (i % 3), top_p=1.0 - 0.1 * (i % 2), seed=i, max_tokens=16)
        for i in range(NUM_PROMPTS)
    ]
    alone = [
        list(complete(lonely, [prompt], [params])[0].token_ids) for prompt, params in zip(prompts, seeded, strict=True)
    ]
    together = complete(make_engine(num_kv_pages=60, admission_watermark=0.0), prompts, seeded)
    assert [list(output.token_ids) for output in together] == alone


@on_both_backends("budget", (32, 64, 640), (32,))
def test_a_common_beginning_that_arrives_in_one_burst_is_computed_before_it_is_shared(budget, make_engine):
    """nano-vllm#208: the second request took the first one's pages as cached although they weren't computed yet."""
    common = [(11 * i) % 263 for i in range(160)]
    prompts = [[*common, i, i + 1, i + 2] for i in range(8)]
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    plain = make_engine(enable_prefix_caching=False, max_num_batched_tokens=budget)
    wanted = [list(output.token_ids) for output in complete(plain, prompts, sampling)]
    cached = make_engine(max_num_batched_tokens=budget)
    assert [list(output.token_ids) for output in complete(cached, prompts, sampling)] == wanted
    assert [list(output.token_ids) for output in complete(cached, prompts, sampling)] == wanted


def test_tiny_temperatures_are_greedy_beside_a_hot_neighbour(prompts, alone, make_engine):
    """vllm#2937, aici#19: a tiny temperature overflowed, and a greedy row was divided by its own zero."""
    engine = make_engine()
    tiny = [
        SamplingParams(temperature=temperature, top_p=0.9, max_tokens=24, ignore_eos=True)
        for temperature in (0, 1e-9, 1e-7, 9e-6)
    ]
    hot = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
    outputs = complete(engine, [prompts[2]] * 5, [*tiny, hot])
    assert [list(output.token_ids) for output in outputs[:4]] == [alone[2]] * 4


def test_a_window_holds_across_chunks_and_prefix_hits(tokenizer, backend):
    """vllm#4057, executorch#21857: with split prefill or prefix reuse, tokens saw further back than the window."""
    from dataclasses import replace

    from jaxcb.config import EngineConfig

    spec = replace(SPEC, windows=(32, None))
    weights = sensitive_params(spec, seed=5)
    prompt = [(13 * i) % 263 for i in range(200)]
    sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    answers = []
    for budget in (24, 64, 256) if backend == "native" else (24, 256):
        config = EngineConfig(
            max_num_seqs=8,
            max_num_batched_tokens=budget,
            max_model_len=700,
            num_kv_pages=64,
            decode_buckets=(),
            mixed_buckets=(),
            dtype="float32",
            backend=backend,
        )
        with Engine("windowed", spec, weights, tokenizer, config) as engine:
            engine.compile(progress=False)
            engine.run()
            first, hit = (complete(engine, [prompt], sampling)[0] for _ in range(2))
            assert (first.num_cached_tokens, hit.num_cached_tokens) == (0, 192)
            answers += [list(first.token_ids), list(hit.token_ids)]
    assert answers == [answers[-2]] * len(answers)
    unwindowed = replace(SPEC, windows=())
    with Engine("full", unwindowed, weights, tokenizer, config) as engine:
        engine.compile(progress=False)
        engine.run()
        assert list(complete(engine, [prompt], sampling)[0].token_ids) != answers[0], "the window changes nothing"


def test_tokens_of_a_mixture_of_experts_are_those_of_the_request_alone(prompts, tokenizer, backend):
    """Alone and together, in chunks of 17, preempted: how many rows an expert has, and which, changes nothing."""
    from dataclasses import replace

    from jaxcb.config import EngineConfig

    spec = replace(SPEC, family="mixtral", intermediate_size=48, num_experts=6, num_experts_per_token=2)
    weights, some, answers = sensitive_params(spec, seed=5), prompts[:12], []
    tight = {"max_num_seqs": 8, "max_num_batched_tokens": 17, "num_kv_pages": 48, "admission_watermark": 0.0}
    for together, limits in ((False, {"max_num_seqs": 1, "max_num_batched_tokens": 640}), (True, tight)):
        config = EngineConfig(
            **({"max_model_len": 700, "num_kv_pages": 64} | limits),
            decode_buckets=(),
            mixed_buckets=(),
            dtype="float32",
            backend=backend,
        )
        with Engine("mixture", spec, weights, tokenizer, config) as engine:
            engine.compile(progress=False)
            engine.run()
            parts = [some] if together else [[prompt] for prompt in some]
            answers.append([list(out.token_ids) for part in parts for out in complete(engine, part, GREEDY)])
            assert engine.stats().preemptions > 0 or not together
    assert answers[0] == answers[1]
    assert np.mean([len(set(answer)) for answer in answers[0]]) > 8
