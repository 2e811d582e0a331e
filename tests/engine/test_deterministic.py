"""deterministic=True: tokens and log-probabilities of a request have the same bits in any company and on any way."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcb.config import Backend, EngineConfig
from jaxcb.engine import Engine
from jaxcb.models.params import Params
from jaxcb.request import RequestOutput, SamplingParams
from tests.engine.conftest import SPEC, engines_over, sensitive_params
from tests.engine.run import complete, prompts_that_share_beginnings

NUM_REQUESTS = 64
KINDS = (
    {"temperature": 0},
    {"seed": 1},
    {"seed": 2, "top_p": 0.8, "top_k": 40, "min_p": 0.01, "temperature": 0.7},
    {"seed": 3, "typical_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "top_n_sigma": 3.0},
)
"""Of each tier one."""
SHAPE = {"deterministic": True}
ALONE = SHAPE | {"max_num_seqs": 1, "max_num_batched_tokens": 320, "enable_prefix_caching": False, "run_ahead": False}
TOGETHER = SHAPE | {"max_num_seqs": 64, "max_num_batched_tokens": 256}
TIGHT = SHAPE | {
    "max_model_len": 384,
    "num_kv_pages": 26,
    "admission_watermark": 0.0,
    "max_num_batched_tokens": 40,
    "host_kv_gib": 0.05,
}
"""Both kinds of preemption run the same programs: they are compiled once."""


@pytest.fixture(
    scope="module",
    params=[pytest.param("xla", marks=pytest.mark.slow), pytest.param("native", marks=pytest.mark.native)],
)
def backend(request: pytest.FixtureRequest) -> Backend:
    """xla compiles for two minutes; its kernels have a short form in tests/pallas_kernels/test_one_path.py."""
    return request.param


PROMPTS = prompts_that_share_beginnings(
    [1, 16, 17, 300, 128, 129], NUM_REQUESTS, SPEC.vocab_size, log_mean=3.2, log_sigma=1.0, longest=250, seed=5
)
SAMPLING = [
    SamplingParams(
        max_tokens=4 + i % 23,
        ignore_eos=True,
        logprobs=5,
        prompt_logprobs=3 if i % 8 == 1 else None,
        **KINDS[i % len(KINDS)],
    )
    for i in range(NUM_REQUESTS)
]


def bits(output: RequestOutput) -> tuple[object, ...]:
    """Everything that a request is told, floats by their bits."""
    found = []
    for logprobs in (output.logprobs, output.prompt_logprobs):
        if logprobs is not None:
            values = (logprobs.logprobs, logprobs.top_logprobs)
            found += [tuple(np.ascontiguousarray(value).view(np.int32).ravel().tolist()) for value in values]
            found += [tuple(logprobs.ranks.tolist()), tuple(logprobs.top_ids.ravel().tolist())]
    return tuple(output.token_ids), *found


def run(engine, indices: Sequence[int]) -> dict[int, tuple[object, ...]]:
    outputs = complete(engine, [PROMPTS[i] for i in indices], [SAMPLING[i] for i in indices])
    return {i: bits(output) for i, output in zip(indices, outputs, strict=True)}


def in_dtype(params: Params, dtype: str) -> Params:
    """As a load gives them: scales and biases stay float32."""
    return jax.tree.map(lambda x: x if x.ndim == 1 else x.astype(jnp.dtype(dtype)), params)


@pytest.fixture(scope="module")
def alone(make_engines) -> dict[int, tuple[object, ...]]:
    engine = make_engines(**ALONE)
    return {i: run(engine, [i])[i] for i in range(NUM_REQUESTS)}


def test_batches_of_1_to_64_in_any_order(make_engines, alone):
    """Answers of different lengths: a burst of 64 passes through smaller batches on its way out."""
    engine = make_engines(**TOGETHER)
    order = list(range(NUM_REQUESTS))
    assert run(engine, order) == alone
    random.Random(1).shuffle(order)
    assert run(engine, order) == alone, "now with prefix hits"
    assert engine.stats().prompt_tokens_cached > 500
    start = 0
    for size in (1, 2, 3, 7, 15, 36):
        some = order[start : start + size]
        assert run(engine, some) == {i: alone[i] for i in some}
        start += size


@pytest.mark.parametrize(
    "changes",
    [
        {"preemption": "recompute", "max_chunk_tokens": 17, "enable_prefix_caching": False},
        {"preemption": "swap", "max_chunk_tokens": 33},
    ],
    ids=["recompute", "swap"],
)
def test_small_chunks_and_preemption(changes, make_engines, alone):
    engine = make_engines(**TIGHT, **changes)
    assert run(engine, range(NUM_REQUESTS)) == alone
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.swaps == (stats.preemptions if changes["preemption"] == "swap" else 0)


@pytest.mark.native
def test_bfloat16_weights_and_pages(params, tokenizer):
    """The short form: half of the requests, and of the crossings the tightest. tests/gpu has all of them."""
    some = range(NUM_REQUESTS // 2)
    with engines_over(in_dtype(params, "bfloat16"), tokenizer, "native") as make:
        one = make(**ALONE, dtype="bfloat16")
        alone = {i: run(one, [i])[i] for i in some}
        tight = make(**TIGHT, dtype="bfloat16", max_chunk_tokens=33)
        assert run(tight, some) == alone
        assert tight.stats().preemptions > 0 and tight.stats().prompt_tokens_cached > 0


@pytest.mark.slow
def test_a_mixture_of_experts_has_the_same_bits_too(tokenizer, backend):
    """Whatever rows its experts have beside a request's own, in chunks of 40 and whole."""
    spec = dataclasses.replace(SPEC, family="mixtral", intermediate_size=48, num_experts=6, num_experts_per_token=2)
    params, found = sensitive_params(spec, seed=5), []
    for limits in (ALONE, TIGHT | {"max_num_seqs": 8}):
        sizes = {"max_model_len": 384, "num_kv_pages": 400, "decode_buckets": (), "mixed_buckets": ()}
        config = EngineConfig(**(sizes | limits), dtype="float32", backend=backend)
        with Engine("mixture", spec, params, tokenizer, config) as engine:
            engine.compile(progress=False)
            engine.run()
            groups = [list(range(12))] if config.max_num_seqs != 1 else [[i] for i in range(12)]
            found.append({i: each for group in groups for i, each in run(engine, group).items()})
    assert found[0] == found[1]
