"""Clients of the application around the fake engine, without a socket; and a model for the real one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from jaxcb.serve.app import make_app

from .fake_engine import FakeEngine
from .tiny_model import write_tiny_model


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[TestClient]:
    with TestClient(make_app(engine), raise_server_exceptions=False) as client:  # one loop for all of a test's calls
        yield client


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny model for the real server."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
