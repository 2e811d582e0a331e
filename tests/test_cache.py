import os
import threading
import time
from pathlib import Path

import pytest

from jaxcb.cache import cache_dir, cached_dir
from jaxcb.errors import ModelError


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXCB_CACHE", str(tmp_path / "cache"))


def test_place_of_the_cache(monkeypatch):
    monkeypatch.setenv("JAXCB_CACHE", "/a/b")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/a/b")
    monkeypatch.delenv("JAXCB_CACHE")
    assert cache_dir() == Path("/xdg/jaxcb")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_dir() == Path("/home/someone/.cache/jaxcb")


def test_directory_is_built_once():
    builds = []

    def build(path: Path) -> None:
        builds.append(path)
        (path / "file").write_text("done")

    assert cached_dir("thing", build) == cached_dir("thing", build)
    assert len(builds) == 1
    assert (cached_dir("thing", build) / "file").read_text() == "done"


def test_directory_appears_only_when_it_is_complete():
    def build(path: Path) -> None:
        (path / "half").write_text("")
        assert not (cache_dir() / "thing").exists()

    cached_dir("thing", build)


def test_failed_build_leaves_nothing_and_can_be_tried_again():
    def fail(path: Path) -> None:
        (path / "half").write_text("")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        cached_dir("thing", fail)
    assert [path for path in cache_dir().iterdir() if path.is_dir()] == []
    assert cached_dir("thing", lambda path: None).is_dir()


def test_remains_of_a_killed_build_are_removed():
    cache_dir().mkdir()
    (cache_dir() / ".thing-abc123").mkdir()
    cached_dir("thing", lambda path: None)
    assert [path.name for path in cache_dir().iterdir() if path.is_dir()] == ["thing"]


def test_of_two_at_once_one_builds_and_both_get_it():
    builds, results = [], []

    def build(path: Path) -> None:
        builds.append(path)
        time.sleep(0.2)
        (path / "file").write_text("done")

    def work() -> None:
        results.append((cached_dir("thing", build) / "file").read_text())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1
    assert results == ["done"] * 4


@pytest.mark.skipif(os.name != "posix", reason="needs a path that can't be created")
def test_cache_that_can_not_be_written_is_a_model_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXCB_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match=r"can't write the model cache .*Set JAXCB_CACHE"):
        cached_dir("thing", lambda path: None)
