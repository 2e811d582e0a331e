"""Whoever asks how an engine does, or ends it, is not kept waiting by what its thread waits for."""

from __future__ import annotations

import threading
import time
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jaxcb.config import EngineConfig
from jaxcb.engine import Engine
from jaxcb.engine.inbox import Arrival, Inbox, Post
from jaxcb.engine.loop import StepLoop
from jaxcb.errors import EngineStoppedError
from jaxcb.request import Request, SamplingParams
from tests.engine.conftest import SPEC

SOON_S = 5.0
REQUEST = Request(request_id="a", prompt_token_ids=[1], sampling=SamplingParams())


class Life:
    """The thread of an engine that has nothing to do but what is in its inbox."""

    def __init__(self) -> None:
        core: Any = types.SimpleNamespace(has_work=False, something_came=lambda: None, step=list)
        text: Any = types.SimpleNamespace(put=lambda events: None)
        guard: Any = types.SimpleNamespace(watch=lambda: threading.Lock())  # something to enter
        self.inbox = Inbox()
        self.loop = StepLoop(self.inbox, core, text, guard)
        self.thread = threading.Thread(target=self.loop.run, daemon=True)
        self.thread.start()
        self.begun, self.go_on = threading.Event(), threading.Event()

    def wait(self) -> None:
        """As for devices that another host keeps waiting."""
        self.begun.set()
        assert self.go_on.wait(2 * SOON_S)


@pytest.fixture
def life() -> Iterator[Life]:
    made = Life()
    yield made
    made.go_on.set()
    made.inbox.stop(0.0)
    made.thread.join(3 * SOON_S)
    assert not made.thread.is_alive()


@pytest.mark.parametrize("kind", ["call", "post"])
def test_the_inbox_is_open_while_the_engines_thread_waits(life: Life, kind: str):
    with ThreadPoolExecutor() as threads:
        if kind == "call":
            threads.submit(life.inbox.call, life.wait)
        else:
            life.inbox.put(Post(life.wait))
        assert life.begun.wait(SOON_S)
        assert threads.submit(life.inbox.open_keys).result(SOON_S) == []
        life.go_on.set()


def test_who_waits_for_a_call_that_never_ends_learns_that_the_engine_has_failed(life: Life):
    with ThreadPoolExecutor() as threads:
        stuck = threads.submit(life.inbox.call, life.wait)
        assert life.begun.wait(SOON_S)
        queued = threads.submit(life.inbox.call, life.wait)
        deadline_s = time.monotonic() + SOON_S
        while not life.inbox.num_items:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
        threads.submit(life.loop.fail, "a host is lost").result(SOON_S)
        for call in (stuck, queued):
            assert isinstance(error := call.exception(SOON_S), EngineStoppedError) and str(error) == "a host is lost"
        life.go_on.set()  # what comes of it after all is nobody's


def test_a_request_counts_as_waiting_until_it_is_taken(life: Life):
    """Behind something that takes its time, and while it is given to the scheduler."""
    counts = []
    with ThreadPoolExecutor() as threads:
        threads.submit(life.inbox.call, life.wait)
        assert life.begun.wait(SOON_S)
        taken = threading.Event()

        def add(choices: list[Request], grammar: Any) -> None:
            asked = threads.submit(life.inbox.open_keys)  # nobody sees the moment between
            counts.append((life.inbox.num_arrived(), asked.done()))
            taken.set()

        life.inbox.put(Arrival([REQUEST], None, add))
        with life.inbox.lock:
            counts.append((life.inbox.num_arrived(), False))
        life.go_on.set()
        assert taken.wait(SOON_S)
    assert counts == [(1, False), (0, False)]


def test_a_shutdown_does_not_wait_for_a_thread_that_can_not_be_woken(monkeypatch: pytest.MonkeyPatch):
    """The host that it waits for dies when the shutdown has begun."""
    monkeypatch.setattr("jaxcb.engine.engine._STUCK_S", 0.05)
    inbox, stuck = Inbox(), threading.Event()
    thread = threading.Thread(target=stuck.wait, daemon=True)
    thread.start()
    done: list[str] = []
    engine: Any = types.SimpleNamespace(
        _inbox=inbox,
        _thread=thread,
        _text=types.SimpleNamespace(put=lambda events: None, close=lambda: done.append("text")),
        _grammars=types.SimpleNamespace(close=lambda: done.append("grammars")),
        _step_log=None,
        _trace=None,
        _followers=types.SimpleNamespace(close=lambda: done.append("followers")),
    )
    with ThreadPoolExecutor() as threads:
        ends = threads.submit(Engine.shutdown, engine)
        try:
            with pytest.raises(TimeoutError):
                ends.result(0.2)
            inbox.fail("a host is lost")
            ends.result(SOON_S)
        finally:
            stuck.set()
    assert done == ["text", "grammars", "followers"]


def test_no_thread_stays_behind_of_an_engine_that_fails_to_start(params, monkeypatch: pytest.MonkeyPatch):
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(Engine, "compile", fails)
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="no memory"):
        Engine.start(EngineConfig(model=(SPEC, params), max_num_seqs=2, num_kv_pages=20, max_model_len=100))
    assert not [thread for thread in threading.enumerate() if "jaxcb" in thread.name and thread not in before]
