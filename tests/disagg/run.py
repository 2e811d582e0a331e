"""Requests for tests of hand-overs, and what must be true when they are done."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from jaxcb.disagg import Disaggregated, PromptService, roles
from jaxcb.disagg.connector import connector_of
from jaxcb.disagg.identity import identity_of
from jaxcb.disagg.remote import RemoteLink
from jaxcb.disagg.server import PrefillServer
from jaxcb.engine import Engine, ServingEngine
from jaxcb.engine.incoming import Incoming
from jaxcb.request import Request, RequestOutput, SamplingParams

PROMPTS = [[(5 * i * j + j) % 250 for j in range(20 + 37 * i)] for i in range(8)]
"""Of 20 to 279 tokens: the longest take several chunks."""
SAMPLING = [
    SamplingParams(
        max_tokens=12, ignore_eos=True, temperature=0.7 * (i % 2), seed=i, repetition_penalty=1 + 0.2 * (i % 3)
    )
    for i in range(8)
]


def keep_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode engine takes no prompts for want of anything else to do: tests of hand-overs want hand-overs."""
    monkeypatch.setattr(roles, "takes_prompts", lambda **load: False)
    monkeypatch.setattr(Incoming, "take_back", lambda *arguments: None)


def answers(
    engine: ServingEngine, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], **fields: object
) -> list[list[RequestOutput]]:
    """The last output of every choice of every request, all submitted at once."""
    streams = [
        engine.submit_choices(
            Request(request_id=f"r{i}", prompt_token_ids=prompt, sampling=params, **fields), blocking=True
        )
        for i, (prompt, params) in enumerate(zip(prompts, sampling, strict=True))
    ]
    return [[list(stream)[-1] for stream in choices] for choices in streams]


def tokens_of(outputs: Sequence[Sequence[RequestOutput]]) -> list[list[list[int]]]:
    return [[list(output.token_ids) for output in choices] for choices in outputs]


def assert_nothing_is_held(*engines: Engine, within_s: float = 10.0) -> None:
    """Soon every page of every pool is free and every reference is accounted for."""
    deadline = time.monotonic() + within_s
    for engine in engines:
        while (stats := engine.stats()).kv_pages_used or stats.num_running or stats.num_waiting:
            assert time.monotonic() < deadline, stats
            time.sleep(0.005)
        engine._inbox.call(engine._scheduler.check)


@contextlib.contextmanager
def serving(engine: Engine, connector: str = "shm", **changes: Any) -> Iterator[PrefillServer]:
    """Prompts are taken from other processes."""
    values = {"secret": ""} | changes
    identity = identity_of(engine, connector)
    server = PrefillServer(PromptService(engine), identity, connector_of(connector), ("127.0.0.1", 0), **values)
    try:
        yield server
    finally:
        server.close()
    assert_nothing_is_held(engine)


@contextlib.contextmanager
def linked(engine: Engine, address: tuple[str, int], connector: str = "shm", **changes: Any) -> Iterator[Disaggregated]:
    """Prompts are given to another process; nothing is cached here."""
    link = RemoteLink(engine, identity_of(engine, connector), connector_of(connector), address, **changes)
    front = Disaggregated(engine, [link])
    engine.reset_prefix_cache()
    try:
        yield front
    finally:
        front._stopping.set()
        front._watcher.join()
        link.close()
    assert_nothing_is_held(engine)


def wait_for(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)
