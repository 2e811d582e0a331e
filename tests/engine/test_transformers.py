"""The whole engine against what transformers computed from the same weights (tests/golden)."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax

from jaxcb.config import EngineConfig
from jaxcb.engine import Engine
from jaxcb.request import SamplingParams
from tests.conftest import GOLDEN
from tests.engine.run import complete
from tests.models.test_decoder import load

PENALTIES = json.loads((GOLDEN / "penalties.json").read_text(encoding="utf-8"))
SHAPE: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 10,
    "max_num_batched_tokens": 16,
    "max_model_len": 128,
    "decode_buckets": (),
    "mixed_buckets": (),
}


@pytest.fixture(scope="module")
def make(tokenizer):
    """Engines over tiny checkpoints, one for each set of changes."""
    engines: dict[tuple[object, ...], Engine] = {}

    def engine_over(name: str, **changes: Any) -> Engine:
        key = (name, *sorted(changes.items()))
        if key not in engines:
            spec, params = load(GOLDEN / "tiny" / name, changes.get("dtype", "float32"))
            engines[key] = engine = Engine(name, spec, params, tokenizer, EngineConfig(**SHAPE | changes))
            engine.compile(progress=False)
            engine.run()
        return engines[key]

    yield engine_over
    for engine in engines.values():
        engine.shutdown()


def penalised() -> tuple[list[list[int]], list[SamplingParams]]:
    params = [SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, **case["params"]) for case in PENALTIES]
    return [case["prompt"] for case in PENALTIES], params


def test_penalties_count_what_transformers_and_openai_count(make):
    """vllm-metal#69, TensorRT-LLM#5623, vmlx-swift#294: the prompt was charged for presence and frequency, or the
    repetition penalty forgot it on the first step. Alone, in one burst, on prefix hits, and preempted in a tight
    pool."""
    wanted = [case["answer"] for case in PENALTIES]
    prompts, params = penalised()
    engine = make("llama", num_kv_pages=40)
    alone = [complete(engine, [prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    assert [list(output.token_ids) for output in alone] == wanted
    assert alone[1].num_cached_tokens == 16
    assert [list(output.token_ids) for output in complete(engine, prompts, params)] == wanted
    tight = make("llama", num_kv_pages=9, admission_watermark=0.0)
    outputs = complete(tight, prompts, params)
    assert [list(output.token_ids) for output in outputs] == wanted
    assert sum(output.num_preemptions for output in outputs) > 0


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_prompts_are_scored_right_in_chunks_and_beside_neighbours(make, name):
    """vllm#8268, #3251, #5344: scores asked for while the prefix is cached or prefill is split were those of other
    positions. Mistral's window (8 positions) holds across chunks too: vllm#4057."""
    engine = make(name, num_kv_pages=40)
    stored = np.load(GOLDEN / "tiny" / name / "logits.npz")
    ids = stored["ids"].tolist()
    expected = log_softmax(stored["logits"], -1)
    scored = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=1)
    plain = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    alone = list(complete(engine, [ids[:20]], plain)[0].token_ids)
    for length in (1, 2, 15, 16, 17, 40):
        for _ in range(2):
            found, neighbour = complete(engine, [ids[:length], ids[:20]], [scored, plain])
            assert list(neighbour.token_ids) == alone
            assert list(found.token_ids) == [int(expected[length - 1].argmax())]
            scores = found.prompt_logprobs
            if length == 1:
                assert scores is None
                continue
            assert scores.token_ids.tolist() == ids[1:length]
            np.testing.assert_allclose(scores.logprobs, expected[np.arange(length - 1), ids[1:length]], atol=1e-3)
            np.testing.assert_array_equal(scores.top_ids[:, 0], expected[: length - 1].argmax(-1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiny_temperatures_are_greedy_with_and_without_a_bias(make, dtype):
    """vllm#2937, #1623: a tiny temperature overflowed beside a bias. The margins here are far above 1e-3."""
    engine = make("llama", num_kv_pages=40) if dtype == "float32" else make("llama", num_kv_pages=40, dtype=dtype)
    for bias in (None, {104: -100.0}):
        params = [
            SamplingParams(temperature=temperature, top_p=0.9, seed=1, max_tokens=24, ignore_eos=True, logit_bias=bias)
            for temperature in (0, 1e-9, 1e-7, 1e-5, 1e-4)
        ]
        first, *others = complete(engine, [PENALTIES[0]["prompt"]] * 5, params)
        assert [other.token_ids for other in others] == [first.token_ids] * 4
        assert (104 in first.token_ids) == (bias is None) and len(first.token_ids) == 24
