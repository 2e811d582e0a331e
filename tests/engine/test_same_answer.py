"""The heart of the suite: a request's answer doesn't depend on what shares the batch, nor on how it was scheduled."""

from __future__ import annotations

import numpy as np
import pytest

from jaxcb.request import SamplingParams
from tests.engine.conftest import SPEC
from tests.engine.run import complete

NUM_PROMPTS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """24 prompts of 1 to 600 tokens; every third begins like the one before it."""
    rng = np.random.default_rng(11)
    lengths = [1, 2, 15, 16, 17, 600, *np.clip(np.exp(rng.normal(4.0, 1.2, NUM_PROMPTS - 6)), 1, 600).astype(int)]
    prompts: list[list[int]] = []
    for i, length in enumerate(lengths):
        ids = rng.integers(0, SPEC.vocab_size, length).tolist()
        if i % 3 == 2:
            shared = prompts[-1][: length - 1]
            ids[: len(shared)] = shared
        prompts.append(ids)
    return prompts


@pytest.fixture(scope="module")
def alone(prompts, params, tokenizer) -> list[list[int]]:
    """Each prompt by itself: one sequence, whole prompt in one step, no prefix cache, no running ahead."""
    from jaxcb.config import EngineConfig
    from jaxcb.engine import Engine

    config = EngineConfig(
        dtype="float32",
        max_num_seqs=1,
        max_num_batched_tokens=640,
        max_model_len=700,
        num_kv_pages=64,
        decode_buckets=(),
        mixed_buckets=(),
        enable_prefix_caching=False,
        run_ahead=False,
    )
    with Engine("small", SPEC, params, tokenizer, config) as engine:
        engine.compile(progress=False)
        engine.run()
        return [list(complete(engine, [prompt], GREEDY)[0].token_ids) for prompt in prompts]


CROSSINGS = {
    "all_together": {"max_num_seqs": 24, "max_num_batched_tokens": 512},
    "budget_17": {"max_num_seqs": 16, "max_num_batched_tokens": 17},
    "budget_512": {"max_num_batched_tokens": 512},
    "preemption": {"num_kv_pages": 60, "admission_watermark": 0.0},
    "no_prefix_cache": {"enable_prefix_caching": False},
    "no_run_ahead": {"run_ahead": False},
    "preemption_no_run_ahead": {"num_kv_pages": 60, "admission_watermark": 0.0, "run_ahead": False},
    "pages_of_64": {"page_size": 64, "num_kv_pages": 100},
    "pages_of_8": {"page_size": 8, "num_kv_pages": 800},
    "many_buckets": {"decode_buckets": (1, 2, 4), "mixed_buckets": (32, 64)},
}


@pytest.mark.parametrize("crossing", CROSSINGS)
def test_tokens_are_those_of_the_request_alone(crossing, prompts, alone, make_engine):
    engine = make_engine(**CROSSINGS[crossing])
    outputs = complete(engine, prompts, GREEDY)
    assert [list(output.token_ids) for output in outputs] == alone
    stats = engine.stats()
    if "preemption" in crossing:
        assert stats.preemptions > 0
    if crossing == "all_together":
        assert sum(output.num_cached_tokens for output in outputs) == stats.prompt_tokens_cached
    assert (stats.num_running, stats.num_waiting, stats.kv_pages_used) == (0, 0, 0)


def test_a_second_round_comes_out_of_the_prefix_cache_and_is_the_same(prompts, alone, make_engine):
    engine = make_engine(num_kv_pages=600)
    for _ in range(2):
        outputs = complete(engine, prompts, GREEDY)
        assert [list(output.token_ids) for output in outputs] == alone
    assert [output.num_cached_tokens for output in outputs] == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]


def test_a_seeded_sample_is_the_same_in_any_company(prompts, make_engine):
    seeded = [
        SamplingParams(temperature=0.9, top_k=20 * (i % 3), top_p=1.0 - 0.1 * (i % 2), seed=i, max_tokens=16)
        for i in range(NUM_PROMPTS)
    ]
    one = make_engine(max_num_seqs=1)
    alone = [
        list(complete(one, [prompt], [params])[0].token_ids) for prompt, params in zip(prompts, seeded, strict=True)
    ]
    together = complete(make_engine(num_kv_pages=60, admission_watermark=0.0), prompts, seeded)
    assert [list(output.token_ids) for output in together] == alone
