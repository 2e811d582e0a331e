"""The admin's routes: there with a key of their own, and nowhere else."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from starlette.testclient import TestClient

from jaxcb.serve.app import make_app

from .fake_engine import FakeEngine
from .test_app import error_of

PATHS = ("/pause", "/resume", "/reset_prefix_cache", "/start_profile", "/stop_profile", "/log_level")
KEY = {"authorization": "Bearer admin"}


@pytest.fixture
def admin(engine: FakeEngine) -> Iterator[TestClient]:
    with TestClient(make_app(engine, api_key="user", admin_api_key="admin"), headers=KEY) as client:
        yield client


def test_without_an_admin_key_there_are_no_such_routes(client: TestClient) -> None:
    for path in PATHS:
        error_of(client.post(path, json={}), 404)


@pytest.mark.parametrize("key", [None, "Bearer user", "Bearer ", "Bearer admin2"])
def test_other_keys_do_not_open_them(admin: TestClient, engine: FakeEngine, key: str | None) -> None:
    for path in PATHS:
        assert error_of(admin.post(path, headers={"authorization": key or ""}), 401)["code"] == "invalid_api_key"
    assert not engine.paused and not engine.num_resets
    error_of(admin.post("/v1/completions", json={"prompt": "a"}), 401)


def test_pause_and_resume_reach_the_engine(admin: TestClient, engine: FakeEngine) -> None:
    assert admin.post("/pause").json() == {"status": "paused"} and engine.paused
    assert admin.post("/resume").json() == {"status": "running"} and not engine.paused
    assert admin.post("/reset_prefix_cache").status_code == 200 and engine.num_resets == 1


def test_the_log_level_can_be_changed(admin: TestClient) -> None:
    logger = logging.getLogger("jaxcb")
    before = logger.level
    try:
        assert admin.post("/log_level", json={"level": "DEBUG"}).json() == {"level": "debug"}
        assert logger.level == logging.DEBUG
        assert admin.get("/log_level").json() == {"level": "debug"}
        assert error_of(admin.post("/log_level", json={"level": "loud"}), 400)["param"] == "level"
    finally:
        logger.setLevel(before)


def test_the_profiler_writes_below_the_cache(
    admin: TestClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[str] = []
    monkeypatch.setenv("JAXCB_CACHE", str(tmp_path))
    monkeypatch.setattr(jax.profiler, "start_trace", started.append)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: started.append("stopped"))
    error_of(admin.post("/stop_profile"), 409)
    directory = admin.post("/start_profile").json()["directory"]
    assert started == [directory] and Path(directory).is_relative_to(tmp_path / "profiles")
    error_of(admin.post("/start_profile"), 409)
    assert admin.post("/stop_profile").json() == {"directory": directory}
    assert started == [directory, "stopped"]
