"""Which engine is given a request: by load and by what its cache holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jaxcb.cluster import Replicas
from jaxcb.cluster.replicas import MOST_AHEAD
from jaxcb.errors import ConfigError, EngineStoppedError, QueueFullError, RequestError
from jaxcb.request import Request, SamplingParams
from tests.engine.conftest import backend, make_engines, params, tokenizer  # noqa: F401  # fixtures

PREFIX = list(range(100))


class FakeEngine:
    """Counts what it is given; everything stays running until ``done``."""

    name = "fake"

    def __init__(self, *, max_waiting: int = 10**6):
        self.healthy = True
        self.taken: list[str] = []
        self.num_open = 0
        self.max_waiting = max_waiting

    def submit(self, request: Request) -> Any:
        if not self.healthy:
            raise EngineStoppedError("stopped")
        if request.prompt_token_ids == [13]:
            raise RequestError("unlucky", param="prompt")
        if self.num_open >= self.max_waiting:
            raise QueueFullError("full")
        self.taken.append(request.request_id)
        self.num_open += 1
        return self

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(num_running=self.num_open, num_waiting=0)

    def shutdown(self, *, drain_s: float = 0.0) -> None:
        self.healthy = False


def cluster(count: int, **changes: Any) -> tuple[Replicas, list[FakeEngine]]:
    engines = [FakeEngine(**changes) for _ in range(count)]
    return Replicas(engines), engines  # type: ignore[arg-type]  # stand-ins


def request(name: str, prompt: list[int], **more: Any) -> Request:
    return Request(request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(), **more)


def test_short_prompts_go_to_the_idlest():
    replicas, engines = cluster(3)
    for i in range(9):
        replicas.submit(request(str(i), [i]))
    assert [len(engine.taken) for engine in engines] == [3, 3, 3]


def test_a_beginning_stays_with_its_engine_until_that_is_too_far_ahead():
    replicas, engines = cluster(2)
    chosen = []
    for i in range(MOST_AHEAD + 2):
        chosen.append(replicas.submit(request(str(i), [*PREFIX, i])))
    assert chosen[: MOST_AHEAD + 1] == [engines[0]] * (MOST_AHEAD + 1)
    assert chosen[-1] is engines[1], "the home is more than MOST_AHEAD ahead"
    assert replicas.submit(request("next", [*PREFIX, 999])) is engines[1], "and has moved"


def test_another_salt_is_another_beginning():
    replicas, engines = cluster(2)
    assert replicas.submit(request("a", PREFIX)) is engines[0]
    assert replicas.submit(request("b", PREFIX, cache_salt="x")) is engines[1], "the idlest"
    assert replicas.submit(request("c", PREFIX)) is engines[0]


def test_full_and_stopped_engines_are_passed_by_until_none_is_left():
    replicas, engines = cluster(2, max_waiting=1)
    engines[0].healthy = False
    assert replicas.submit(request("a", [1])) is engines[1]
    with pytest.raises(QueueFullError):
        replicas.submit(request("b", [1]))
    engines[1].healthy = False
    with pytest.raises(EngineStoppedError):
        replicas.submit(request("c", PREFIX))


def test_an_impossible_request_is_refused_at_once():
    replicas, engines = cluster(2)
    with pytest.raises(RequestError, match="unlucky"):
        replicas.submit(request("a", [13]))
    assert not any(engine.taken for engine in engines)


def test_engines_that_do_not_belong_together_are_refused():
    with pytest.raises(ConfigError, match="at least one"):
        Replicas([])
    one, other = FakeEngine(), FakeEngine()
    other.name = "other"
    with pytest.raises(ConfigError, match="fake, other"):
        Replicas([one, other])  # type: ignore[list-item]  # stand-ins


def test_two_real_engines_answer_as_one_and_reuse_the_beginning(make_engines):  # noqa: F811  # the fixture
    replicas = Replicas([make_engines(num_kv_pages=100), make_engines(num_kv_pages=101)])
    sampling = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    asked = [Request(request_id=str(i), prompt_token_ids=[*PREFIX, i], sampling=sampling) for i in (1, 2, 1, 2)]
    outputs = [list(replicas.submit(one))[-1] for one in asked]
    assert outputs[0].token_ids == outputs[2].token_ids and outputs[1].token_ids == outputs[3].token_ids
    assert [output.num_cached_tokens for output in outputs] == [0, 96, 96, 96]
