"""Engines that hand pages over, and one that doesn't; a module's tests share them."""

from __future__ import annotations

import pytest

from jaxcb.engine import Engine
from tests.engine.conftest import backend, make_engines, params, tokenizer  # noqa: F401  # fixtures


@pytest.fixture(scope="module")
def plain(make_engines) -> Engine:  # noqa: F811  # the fixture
    return make_engines()


@pytest.fixture(scope="module")
def prefill(make_engines) -> Engine:  # noqa: F811
    return make_engines(kv_transfer=True)


@pytest.fixture(scope="module")
def decode(make_engines) -> Engine:  # noqa: F811
    return make_engines(kv_transfer=True, num_kv_pages=399)
