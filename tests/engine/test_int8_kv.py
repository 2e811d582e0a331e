"""Engines whose KV pages hold int8: a request's answer is the same in any company, and pages move with their scales."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxcb.config import EngineConfig
from jaxcb.engine.sizing import resolve_config
from jaxcb.errors import ConfigError
from tests.engine.conftest import SPEC
from tests.engine.run import complete
from tests.engine.test_page_moves import GREEDY, PAGE_GIB, Cores, add, prompt, run

PROMPTS = [prompt(length, seed=length) for length in (1, 15, 16, 40, 49, 58, 67, 76)]
PROMPTS.append(PROMPTS[-1][:64] + PROMPTS[3])


@pytest.fixture(scope="module")
def cores(params) -> Cores:
    return Cores(params, backend="native", kv_cache_dtype="int8", kv_transfer=True, max_num_seqs=9)


@pytest.fixture(scope="module")
def alone(cores) -> dict[str, list[int]]:
    answers = {}
    for i, tokens in enumerate(PROMPTS):
        core = cores.core(enable_prefix_caching=False, run_ahead=False)
        add(core, str(i), tokens)
        answers |= run(core)
    assert len({tuple(answer) for answer in answers.values()}) == len(PROMPTS)
    return answers


CROSSINGS = {
    "together": {},
    "chunks": {"max_num_batched_tokens": 17},
    "recompute": {"preemption": "recompute", "admission_watermark": 0.0},
    "swap": {"preemption": "swap", "admission_watermark": 0.0},
    "no_run_ahead": {"run_ahead": False, "enable_prefix_caching": False},
}


@pytest.mark.native
@pytest.mark.parametrize("crossing", CROSSINGS)
def test_answers_are_those_of_the_request_alone(crossing, cores, alone):
    core = cores.core(**CROSSINGS[crossing])
    for i, tokens in enumerate(PROMPTS):
        add(core, str(i), tokens)
    assert run(core) == alone
    if crossing in ("recompute", "swap"):
        assert core.scheduler.counters.preemptions > 0
        assert core.scheduler.counters.swaps == (core.scheduler.counters.preemptions if crossing == "swap" else 0)


@pytest.mark.native
def test_a_beginning_is_found_again_forked_and_handed_over(cores, alone):
    core = cores.core(num_kv_pages=24)
    for name in ("7", "7"):
        add(core, name, PROMPTS[7])
        assert run(core) == {name: alone[name]}
    prefix = core.export_prefix(PROMPTS[7], "")
    assert (len(prefix.token_ids), prefix.pages.shape, prefix.pages.dtype) == (64, (4, 2 * 2 * 2 * 16 * 20), np.uint8)
    other = cores.core()
    assert other.import_prefix(prefix, "") == 64
    add(other, "8", PROMPTS[8])
    assert run(other) == {"8": alone["8"]}
    assert other.scheduler.counters.prompt_tokens_cached == 64


@pytest.mark.native
def test_the_cache_is_int8_and_takes_so_many_bytes(cores, params):
    page_bytes = 2 * 2 * 16 * 2 * (16 + 4)
    assert cores.runner.kv_bytes == 25 * page_bytes
    assert cores.config.kv_cache_memory_bytes == 24 * page_bytes
    sized = EngineConfig(kv_cache_dtype="int8", kv_cache_memory_bytes=100 * page_bytes + 7, max_model_len=256)
    assert resolve_config(sized, SPEC, jnp.float32).num_kv_pages == 100
    assert cores.runner.shape.num_host_pages == int(64 * PAGE_GIB * 2**30) // page_bytes


@pytest.mark.slow  # XLA compiles for longer than it computes; tests/step/test_kv_pool.py is the short form
def test_xla_keeps_int8_pages_too(make_engine):
    """Deterministic, since another last bit of a key may round to another int8."""
    engine = make_engine(
        backend="xla", kv_cache_dtype="int8", deterministic=True, num_kv_pages=24, max_model_len=256,
        max_num_batched_tokens=64, admission_watermark=0.0,
    )  # fmt: skip
    alone = [complete(engine, [tokens], GREEDY)[0].token_ids for tokens in PROMPTS]
    assert len(set(map(tuple, alone))) == len(PROMPTS)
    assert [output.token_ids for output in complete(engine, PROMPTS, GREEDY)] == alone
    assert engine.stats().preemptions > 0


def test_other_backends_refuse_it_by_name():
    config = EngineConfig(kv_cache_dtype="int8", backend="triton", num_kv_pages=100)
    with pytest.raises(
        ConfigError, match="kv_cache_dtype int8 is for backends native and xla, not for triton"
    ) as error:
        resolve_config(config, SPEC, jnp.float32)
    assert error.value.param == "kv_cache_dtype"
    with pytest.raises(ConfigError, match="kv_cache_dtype bfloat16 needs dtype bfloat16, got dtype float32"):
        EngineConfig(kv_cache_dtype="bfloat16", dtype="float32")
