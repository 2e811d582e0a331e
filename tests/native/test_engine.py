"""Whole engines on the native kernels: what the crossings of tests/engine hold in float32, in other number types."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcb.config import Backend, EngineConfig
from jaxcb.disagg.local import LocalLink
from jaxcb.disagg.prompts import PromptService
from jaxcb.engine import Engine
from jaxcb.errors import ConfigError
from jaxcb.models import ModelSpec
from jaxcb.models.params import Params
from jaxcb.request import SamplingParams
from tests.engine.conftest import SPEC, sensitive_params
from tests.engine.run import complete
from tests.text.small_tokenizers import byte_level

pytestmark = pytest.mark.native
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


MIXTURE = dataclasses.replace(SPEC, family="mixtral", intermediate_size=48, num_experts=6, num_experts_per_token=2)


PAIRED = dataclasses.replace(SPEC, head_dim=32)
"""Its pages hold pairs where the CPU multiplies bfloat16."""


def halved(spec: ModelSpec) -> Params:
    return jax.tree.map_with_path(
        lambda path, x: x.astype(jnp.bfloat16) if x.ndim > 1 and "router" not in jax.tree_util.keystr(path) else x,
        sensitive_params(spec, seed=3),
    )


@pytest.mark.parametrize(
    ("spec", "quantization"), [(SPEC, None), (SPEC, "int8"), (MIXTURE, "int8"), (PAIRED, None), (PAIRED, "int8")]
)
def test_bfloat16_and_int8_answers_are_those_of_the_request_alone(spec, quantization):
    weights = halved(spec)
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


def test_pages_move_as_they_are_and_only_to_engines_that_have_the_same():
    """Out of the way and back, from one engine to another: in the order that this CPU's kernels take."""
    weights = halved(PAIRED)
    rng = np.random.default_rng(8)
    prompts = [rng.integers(0, PAIRED.vocab_size, length).tolist() for length in (100, 130, 90, 117)]
    sampling = dataclasses.replace(GREEDY, max_tokens=40)

    @contextlib.contextmanager
    def engine(backend: Backend = "native", **changes: object) -> Iterator[Engine]:
        values = {"max_model_len": 400, "num_kv_pages": 100, "decode_buckets": (), "mixed_buckets": ()} | changes
        with Engine("small", PAIRED, weights, byte_level(), EngineConfig(backend=backend, **values)) as made:
            made.compile(progress=False)
            made.run()
            yield made

    def tokens(engine: Engine) -> list[list[int]]:
        return [list(output.token_ids) for output in complete(engine, prompts, sampling)]

    with engine(kv_transfer=True) as one, engine(kv_transfer=True) as other, engine("xla", kv_transfer=True) as xla:
        expected = tokens(one)
        assert other.handovers.import_prefix(one.handovers.export_prefix(prompts[1])) == 128
        [output] = complete(other, [prompts[1]], sampling)
        assert (list(output.token_ids), output.num_cached_tokens) == (expected[1], 128)
        by_xla = xla.handovers.export_prefix(prompts[1])
        assert by_xla.order == "rows"
        if one.handovers.page_form.endswith("pairs"):
            with pytest.raises(ConfigError, match="the pages hold rows, this engine's hold pairs"):
                one.handovers.import_prefix(by_xla)
            with pytest.raises(ConfigError, match=r"in pairs, the prefill engine of .* in rows"):
                LocalLink(PromptService(xla), one)
        LocalLink(PromptService(other), one).close()
    tight = {"num_kv_pages": 30, "admission_watermark": 0.0, "enable_prefix_caching": False}
    with engine(**tight, preemption="swap", host_kv_gib=0.01) as small:
        assert tokens(small) == expected
        assert small.stats().swaps > 0
