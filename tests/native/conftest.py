"""The kernels of this machine, loaded once."""

from __future__ import annotations

import pytest

from jaxcb.cache import cache_dir
from pallas_kernels import native


@pytest.fixture(scope="session", autouse=True)
def library() -> native.Library:
    return native.load(cache_dir() / "native")
