"""What happens to an answer when the client leaves or the engine fails, seen at the ASGI boundary."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from jaxcb.serve import answer
from jaxcb.serve.app import make_app

from .fake_engine import FakeEngine
from .sse import events


class Connection:
    """One HTTP request against the application; ``leave`` closes the client's side."""

    def __init__(self, engine: FakeEngine, path: str = "/v1/completions", **fields: Any):
        self._app = make_app(engine)
        self._path = path
        self._body = json.dumps({"prompt": "abc", **fields}).encode()
        self._asked = 0
        self.left = asyncio.Event()
        self.status: int | None = None
        self.received = b""
        self.task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        scope = {
            "type": "http",
            "method": "POST",
            "path": self._path,
            "raw_path": self._path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        await self._app(scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        self._asked += 1
        if self._asked == 1:
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        self.received += message.get("body", b"")


async def until(condition: Any, *, timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["abc", ["abc", "de", "f"]])
def test_a_client_that_leaves_frees_everything(stream: bool, prompt: Any) -> None:
    async def scenario() -> None:
        engine = FakeEngine(step_s=0.01)
        connection = Connection(engine, prompt=prompt, stream=stream, max_tokens=100)
        count = 1 if isinstance(prompt, str) else len(prompt)
        await until(lambda: engine.counts["generation"] >= 3)
        assert len(engine.live) == count
        connection.left.set()
        await asyncio.wait_for(connection.task, 1)
        assert not engine.live
        assert engine.finished["abort"] == count

    asyncio.run(scenario())


def test_a_client_that_stays_is_not_aborted() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        connection = Connection(engine, stream=True)
        await connection.task
        assert connection.status == 200
        assert engine.finished == {"stop": 0, "length": 1, "abort": 0, "error": 0}

    asyncio.run(scenario())


def test_the_first_token_does_not_wait_for_the_last() -> None:
    async def scenario() -> None:
        engine = FakeEngine(step_s=0.01)
        connection = Connection(engine, stream=True, max_tokens=100)
        await until(lambda: b'"text":"a"' in connection.received)
        assert engine.live
        connection.left.set()
        await connection.task

    asyncio.run(scenario())


def test_failure_before_the_answer_is_500() -> None:
    async def scenario() -> None:
        engine = FakeEngine(step_s=0.002)
        connection = Connection(engine, prompt=["?bc", "de"], max_tokens=100)
        await connection.task
        assert connection.status == 500
        error = json.loads(connection.received)["error"]
        assert (error["type"], error["code"]) == ("server_error", "engine_error")
        assert b"/secret" not in connection.received
        assert not engine.live
        assert (engine.finished["error"], engine.finished["abort"]) == (1, 1)

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_what_turns_out_to_be_impossible_is_the_request_s_own_fault(stream: bool) -> None:
    """Its parameters leave no token that its grammar allows, say: the client reads why, and the engine goes on."""

    async def scenario() -> None:
        engine = FakeEngine(step_s=0.002)
        connection = Connection(engine, prompt="~bc", max_tokens=100, stream=stream)
        await connection.task
        assert connection.status == (200 if stream else 400)
        text = connection.received.decode()
        error = (events(text)[-1] if stream else json.loads(text))["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "request_failed")
        assert error["message"] == "no token could be sampled"
        assert engine.healthy

    asyncio.run(scenario())


def test_failure_inside_a_stream_is_an_error_event() -> None:
    async def scenario() -> None:
        engine = FakeEngine(step_s=0.002)
        fields = {"max_tokens": 100, "stream": True, "stream_options": {"include_usage": True}}
        connection = Connection(engine, prompt=["?bc", "de"], **fields)
        await connection.task
        *chunks, last = events(connection.received.decode())
        assert connection.status == 200
        assert all("choices" in chunk for chunk in chunks)
        assert last["error"]["code"] == "engine_error"
        assert b"/secret" not in connection.received
        assert not engine.live
        assert (engine.finished["error"], engine.finished["abort"]) == (1, 1)

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_cut_short_by_a_shutdown_is_told_so(stream: bool) -> None:
    async def scenario() -> None:
        engine = FakeEngine(step_s=0.01)
        connection = Connection(engine, stream=stream, max_tokens=100)
        await until(lambda: engine.counts["generation"] >= 3)
        await asyncio.to_thread(engine.shutdown)
        await asyncio.wait_for(connection.task, 1)
        error = events(connection.received.decode())[-1] if stream else json.loads(connection.received)
        assert connection.status == (200 if stream else 503)
        assert error["error"]["code"] == "engine_stopped"

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_a_cancelled_handler_aborts_its_requests(stream: bool) -> None:
    async def scenario() -> None:
        engine = FakeEngine(step_s=0.01)
        connection = Connection(engine, stream=stream, max_tokens=100)
        await until(lambda: engine.counts["generation"] >= 3)
        connection.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connection.task
        assert not engine.live

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "fields", "comment"),
    [
        ("/v1/completions", {}, b": keep-alive\n\n"),
        ("/v1/responses", {"input": "abc", "prompt": None}, b": keep-alive\n\n"),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
            b'event: ping\ndata: {"type":"ping"}\n\n',
        ),
    ],
)
def test_a_silent_stream_is_kept_alive(
    monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any], comment: bytes
) -> None:
    monkeypatch.setattr(answer, "KEEP_ALIVE_S", 0.02)
    body = {name: value for name, value in fields.items() if value is not None}

    async def scenario(step_s: float) -> bytes:
        connection = Connection(FakeEngine(step_s=step_s), path, stream=True, **body)
        if path != "/v1/completions":
            sent = json.loads(connection._body)
            connection._body = json.dumps({name: value for name, value in sent.items() if name != "prompt"}).encode()
        await until(lambda: connection.received.count(comment) > 2 or connection.task.done())
        connection.left.set()
        await connection.task
        return connection.received

    assert asyncio.run(scenario(0.3)).count(comment) > 2
    assert asyncio.run(scenario(0.0)).count(comment) <= 1
