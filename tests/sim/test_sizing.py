import dataclasses

import pytest

from jaxcb.config import EngineConfig
from jaxcb.errors import ConfigError
from jaxcb.sim import GPUS, MODELS, limits_on

H200, MODEL = GPUS["h200"], MODELS["8b"]


def test_the_kv_cache_takes_what_the_weights_leave():
    limits = limits_on(H200, MODEL, EngineConfig())
    free_bytes = int(141e9 * 0.92) - 2 * 8_029_995_008 - 2**30
    assert limits.num_kv_pages == free_bytes // (16 * 131_072) == 53_685
    assert (limits.max_num_seqs, limits.max_num_batched_tokens, limits.num_slots) == (256, 2048, 512)
    assert limits.max_model_len == 131_072


def test_few_sequences_get_no_more_pages_than_they_can_fill():
    assert limits_on(H200, MODEL, EngineConfig(max_num_seqs=2, max_model_len=1000)).num_kv_pages == 2 * 63


def test_the_context_is_cut_to_what_the_cache_holds_unless_it_was_asked_for():
    assert limits_on(GPUS["l4"], MODEL, EngineConfig()).max_model_len == 2358 * 16
    with pytest.raises(ConfigError, match="2358 pages of 16 tokens"):
        limits_on(GPUS["l4"], MODEL, EngineConfig(max_model_len=100_000))


def test_pages_may_be_given_by_number_or_by_bytes():
    assert limits_on(H200, MODEL, EngineConfig(num_kv_pages=100)).num_kv_pages == 100
    assert limits_on(H200, MODEL, EngineConfig(kv_cache_memory_bytes=2**30)).num_kv_pages == 2**30 // (16 * 131_072)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EngineConfig(num_kv_pages=60_000), "60000 pages was asked for; beside the model one H200 holds 1 to 53685"),
        (EngineConfig(kv_cache_memory_bytes=1000), "0 pages was asked for"),
        (EngineConfig(max_model_len=200_000), "more than the model was made for"),
    ],
)
def test_limits_that_do_not_fit_the_card_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        limits_on(H200, MODEL, config)


def test_a_model_larger_than_the_card_is_refused():
    with pytest.raises(ConfigError, match=r"weights take 141\.1 GB in bfloat16, and of the 141 GB of one H200 92%"):
        limits_on(H200, MODELS["70b"], EngineConfig())
    larger = dataclasses.replace(H200, memory_bytes=180e9)
    assert limits_on(larger, MODELS["70b"], EngineConfig()).num_kv_pages > 0
