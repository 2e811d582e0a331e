"""Clients of the application around the fake engine, without a socket."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from jaxcb.serve.app import make_app

from .fake_engine import FakeEngine


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[TestClient]:
    with TestClient(make_app(engine), raise_server_exceptions=False) as client:  # one loop for all of a test's calls
        yield client
