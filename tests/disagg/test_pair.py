"""Prompts on one engine, answers on another: the same tokens as on one engine, and nothing stays behind."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from jaxcb.disagg import PrefillDecodePair
from jaxcb.engine import Engine
from jaxcb.engine.core import PrefixPages
from jaxcb.errors import ConfigError, EngineStoppedError, RequestError
from jaxcb.request import FinishReason, Request, SamplingParams
from tests.engine.conftest import backend, make_engines, params, tokenizer  # noqa: F401  # fixtures
from tests.engine.run import complete

PROMPTS = [[(5 * i * j + j) % 250 for j in range(20 + 37 * i)] for i in range(8)]
SAMPLING = [
    SamplingParams(
        max_tokens=12, ignore_eos=True, temperature=0.7 * (i % 2), seed=i, repetition_penalty=1 + 0.2 * (i % 3)
    )
    for i in range(8)
]


def requests(prompts=PROMPTS) -> list[Request]:
    return [
        Request(request_id=f"r{i}", prompt_token_ids=prompt, sampling=sampling)
        for i, (prompt, sampling) in enumerate(zip(prompts, SAMPLING, strict=False))
    ]


@pytest.fixture(scope="module")
def pair(make_engines) -> Iterator[PrefillDecodePair]:  # noqa: F811  # the fixture
    yield PrefillDecodePair(make_engines(kv_transfer=True), make_engines(kv_transfer=True, num_kv_pages=300))


def is_idle(engine: Engine) -> bool:
    stats = engine.stats()
    return (stats.num_running, stats.num_waiting, stats.kv_pages_used) == (0, 0, 0)


def test_the_answers_are_those_of_one_engine_and_the_prompts_are_not_computed_twice(pair, make_engines):  # noqa: F811
    expected = [list(output.token_ids) for output in complete(make_engines(), PROMPTS, SAMPLING)]
    outputs = pair.complete(requests())
    assert [list(output.token_ids) for output in outputs] == expected
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.num_cached_tokens == (len(prompt) - 1) // 16 * 16, "all but the last page came over"
    assert pair.num_tokens_handed_over >= sum(len(prompt) // 16 * 16 for prompt in PROMPTS) // 2
    assert is_idle(pair.prefill) and is_idle(pair.decode)


def test_a_handed_over_page_holds_the_very_kv_that_was_computed(pair):
    prompt = [(3 * i) % 250 for i in range(100)]
    pair.complete([Request(request_id="x", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=1))])
    source, copy = pair.prefill.export_prefix(prompt), pair.decode.export_prefix(prompt)
    assert source.token_ids == copy.token_ids == prompt[:96]
    np.testing.assert_array_equal(source.pages, copy.pages)
    assert np.abs(source.pages.astype(np.float64)).max() > 0


def test_a_full_decode_pool_costs_time_and_no_answer(pair, make_engines):  # noqa: F811
    small = make_engines(kv_transfer=True, num_kv_pages=24, max_model_len=300)
    outputs = PrefillDecodePair(pair.prefill, small).complete(requests(PROMPTS[:7]))
    assert [list(output.token_ids) for output in outputs] == [
        list(output.token_ids) for output in pair.complete(requests(PROMPTS[:7]))
    ]
    assert is_idle(small)


def test_an_impossible_request_is_refused_before_anything_starts(pair):
    bad = Request(request_id="bad", prompt_token_ids=[1] * 800, sampling=SamplingParams())
    with pytest.raises(RequestError, match="800 tokens"):
        pair.complete([*requests(), bad])
    assert is_idle(pair.prefill) and is_idle(pair.decode)


def test_engines_that_do_not_fit_are_refused_by_name(pair, make_engines):  # noqa: F811
    for changes, param in (
        ({}, "kv_transfer"),
        ({"kv_transfer": True, "enable_prefix_caching": False}, "enable_prefix_caching"),
        ({"kv_transfer": True, "page_size": 8}, "page_size"),
    ):
        with pytest.raises(ConfigError) as error:
            PrefillDecodePair(pair.prefill, make_engines(**changes))
        assert error.value.param == param
    with pytest.raises(ConfigError, match="kv_transfer"):
        make_engines().export_prefix([1, 2])
    with pytest.raises(ConfigError, match="pages hold"):
        pair.decode.import_prefix(PrefixPages([1] * 16, np.zeros((1, 2, 2, 8, 2, 16), np.float32)))


def test_an_engine_that_stops_is_told_and_frees_the_other(make_engines, pair):  # noqa: F811
    stopped = make_engines(kv_transfer=True, seed=1)
    stopped.shutdown()
    with pytest.raises(EngineStoppedError):
        PrefillDecodePair(pair.prefill, stopped).complete(requests())
    with pytest.raises(EngineStoppedError):
        stopped.export_prefix([1] * 20)
    for _ in range(200):
        if is_idle(pair.prefill):
            break
        complete(pair.prefill, [[1]], SamplingParams(max_tokens=1))
    assert is_idle(pair.prefill)
    assert complete(pair.prefill, [[1]], SamplingParams(max_tokens=1))[0].finish_reason is FinishReason.LENGTH


def test_pages_that_make_room_for_a_hand_over_reach_host_memory_before_they_are_written(pair, make_engines):  # noqa: F811
    small = make_engines(kv_transfer=True, num_kv_pages=24, max_model_len=300, host_kv_gib=0.01)
    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    old, new = [[(i * step + 1) % 250 for i in range(272)] for step in (7, 11)]
    [before] = complete(small, [old], sampling)
    kept = small.export_prefix(old).pages
    complete(pair.prefill, [new], sampling)
    assert small.import_prefix(pair.prefill.export_prefix(new)) == 272
    [again] = complete(small, [old], sampling)
    assert again.num_cached_tokens > 0 and small.stats().host_pages_brought_back > 0
    np.testing.assert_allclose(small.export_prefix(old).pages, kept, atol=1e-5)  # a page computed again may round anew
    assert again.token_ids == before.token_ids
