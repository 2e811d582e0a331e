"""The KV of a beginning, exported from one engine and imported by another."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxcb.engine.core import PrefixPages
from jaxcb.errors import ConfigError, EngineStoppedError
from jaxcb.request import SamplingParams
from tests.engine.conftest import backend, make_engines, params, tokenizer  # noqa: F401  # fixtures
from tests.engine.run import complete


def test_an_imported_page_holds_the_very_kv_that_was_computed(make_engines):  # noqa: F811  # the fixture
    one, other = make_engines(kv_transfer=True), make_engines(kv_transfer=True, num_kv_pages=300)
    prompt = [(3 * i) % 250 for i in range(100)]
    sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    [expected] = complete(one, [prompt], sampling)
    assert other.handovers.import_prefix(one.handovers.export_prefix(prompt)) == 96
    source, copy = one.handovers.export_prefix(prompt), other.handovers.export_prefix(prompt)
    assert source.token_ids == copy.token_ids == prompt[:96]
    np.testing.assert_array_equal(source.pages, copy.pages)
    assert np.abs(source.pages.astype(np.float64)).max() > 0
    [output] = complete(other, [prompt], sampling)
    assert (output.token_ids, output.num_cached_tokens) == (expected.token_ids, 96)


def test_what_does_not_fit_is_refused_by_name(make_engines):  # noqa: F811
    with pytest.raises(ConfigError, match="kv_transfer"):
        make_engines().handovers.export_prefix([1, 2])
    with pytest.raises(ConfigError, match="pages hold"):
        other = PrefixPages([1] * 16, np.zeros((1, 2, 2, 8, 2, 16), np.float32))
        make_engines(kv_transfer=True).handovers.import_prefix(other)
    engine = make_engines(kv_transfer=True)
    pages = dataclasses.replace(engine.handovers.export_prefix([1, 2]), order="columns")
    with pytest.raises(ConfigError, match=r"the pages hold columns, this engine's hold (rows|pairs)"):
        engine.handovers.import_prefix(pages)


def test_an_engine_that_has_stopped_says_so(make_engines):  # noqa: F811
    stopped = make_engines(kv_transfer=True, seed=1)
    stopped.shutdown()
    with pytest.raises(EngineStoppedError):
        stopped.handovers.export_prefix([1] * 20)


def test_pages_that_make_room_for_a_beginning_reach_host_memory_before_they_are_written(make_engines):  # noqa: F811
    one = make_engines(kv_transfer=True)
    small = make_engines(kv_transfer=True, num_kv_pages=24, max_model_len=300, host_kv_gib=0.01)
    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    old, new = [[(i * step + 1) % 250 for i in range(272)] for step in (7, 11)]
    [before] = complete(small, [old], sampling)
    kept = small.handovers.export_prefix(old).pages
    complete(one, [new], sampling)
    assert small.handovers.import_prefix(one.handovers.export_prefix(new)) == 272
    [again] = complete(small, [old], sampling)
    assert again.num_cached_tokens > 0 and small.stats().host_pages_brought_back > 0
    brought_back = small.handovers.export_prefix(old).pages
    np.testing.assert_allclose(brought_back, kept, atol=1e-5)  # a page computed again may round anew
    assert again.token_ids == before.token_ids
