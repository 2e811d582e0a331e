"""Whole engines on the native kernels: what the crossings of tests/engine hold in float32, in other number types."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcb.config import EngineConfig
from jaxcb.engine import Engine
from jaxcb.request import SamplingParams
from tests.engine.conftest import SPEC, sensitive_params
from tests.engine.run import complete
from tests.text.small_tokenizers import byte_level

pytestmark = pytest.mark.native
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


MIXTURE = dataclasses.replace(SPEC, family="mixtral", intermediate_size=48, num_experts=6, num_experts_per_token=2)


@pytest.mark.parametrize(("spec", "quantization"), [(SPEC, None), (SPEC, "int8"), (MIXTURE, "int8")])
def test_bfloat16_and_int8_answers_are_those_of_the_request_alone(spec, quantization):
    weights = jax.tree.map_with_path(
        lambda path, x: x.astype(jnp.bfloat16) if x.ndim > 1 and "router" not in jax.tree_util.keystr(path) else x,
        sensitive_params(spec, seed=3),
    )
    rng = np.random.default_rng(7)
    prompts = [rng.integers(0, spec.vocab_size, length).tolist() for length in (1, 16, 17, 300, 60, 130, 5, 90)]

    def answers(**changes: object) -> list[list[int]]:
        values = {"max_model_len": 700, "num_kv_pages": 100, "decode_buckets": (), "mixed_buckets": ()} | changes
        config = EngineConfig(backend="native", quantization=quantization, **values)
        with Engine("small", spec, weights, byte_level(), config) as engine:
            engine.compile(progress=False)
            engine.run()
            if engine.config.max_num_seqs == 1:
                return [list(complete(engine, [prompt], GREEDY)[0].token_ids) for prompt in prompts]
            return [list(output.token_ids) for output in complete(engine, prompts, GREEDY)]

    alone = answers(max_num_seqs=1, max_num_batched_tokens=400, enable_prefix_caching=False, run_ahead=False)
    assert len({tuple(answer) for answer in alone}) > len(prompts) / 2, "equal answers would mean nothing"
    assert answers(max_num_seqs=8, max_num_batched_tokens=400) == alone
    assert answers(max_num_seqs=8, max_num_batched_tokens=17, num_kv_pages=45, admission_watermark=0.0) == alone
