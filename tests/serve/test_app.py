"""Paths, methods, bodies and their errors, all in OpenAI's form."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from jaxcb.serve.app import make_app
from jaxcb.serve.body import MAX_BODY_BYTES

from .fake_engine import MAX_MODEL_LEN, FakeEngine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GOOD = {CHAT: b'{"messages": [{"role": "user", "content": "hi!"}]}', COMPLETIONS: b'{"prompt": "hi!"}'}
BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response, after checking that it has OpenAI's form and gives nothing away."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"}
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["type"], str)
    assert "Traceback" not in response.text and "/secret" not in response.text and ".py" not in response.text
    return error


@BOTH
@pytest.mark.parametrize("content_type", ["application/json", "application/json; charset=utf-8", "Application/JSON"])
def test_json_content_types_are_accepted(client: TestClient, path: str, content_type: str) -> None:
    assert client.post(path, content=GOOD[path], headers={"content-type": content_type}).status_code == 200


@BOTH
@pytest.mark.parametrize(
    ("content_type", "status"),
    [(None, 415), ("text/plain", 415), ("application/x-www-form-urlencoded", 400), ("multipart/form-data", 400)],
)
def test_other_content_types_are_refused(client: TestClient, path: str, content_type: str | None, status: int) -> None:
    """vllm#11171, sglang#7035, tt-inference-server#2771: a missing content type was a 500, any model name was accepted,
    and errors came in several shapes. The tests below go on with the same."""
    headers = {} if content_type is None else {"content-type": content_type}
    error = error_of(client.post(path, content=GOOD[path], headers=headers), status)
    assert "application/json" in error["message"]


@BOTH
@pytest.mark.parametrize(
    "body",
    [
        b"{broken",
        b"[]",
        b'"x"',
        b"",
        b"5",
        b"null",
        b"{}",
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"temperature": NaN}',
        b'{"temperature": 1e999}',
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 100_000,
        b'{"messages": "hi"}',
        b'{"messages": [{"role": "user"}]}',
        b'{"messages": []}',
        b'{"prompt": null}',
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_bodies_are_400(client: TestClient, engine: FakeEngine, path: str, body: bytes, stream: bool) -> None:
    if stream and body.startswith(b'{"'):
        body = b'{"stream": true, ' + body[1:]
    error_of(client.post(path, content=body, headers={"content-type": "application/json"}), 400)
    assert not engine.requests


def test_a_number_out_of_range_is_not_blamed_on_a_field(client: TestClient) -> None:
    body = b'{"prompt": "a", "temperature": 1e999}'
    error = error_of(client.post("/v1/completions", content=body, headers={"content-type": "application/json"}), 400)
    assert error["param"] is None and "number that is out of range" in error["message"]


@BOTH
def test_model_may_be_left_out_but_not_be_wrong(client: TestClient, path: str) -> None:
    good = httpx.Response(200, content=GOOD[path]).json()
    assert client.post(path, json=good).json()["model"] == "fake-model"
    assert client.post(path, json={**good, "model": "fake-model"}).status_code == 200
    error = error_of(client.post(path, json={**good, "model": "nope", "stream": True}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "fake-model" in error["message"]


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT"])
@BOTH
def test_wrong_methods_are_405(client: TestClient, path: str, method: str) -> None:
    response = client.request(method, path)
    error_of(response, 405)
    assert response.headers["allow"] == "POST"


def test_probes_may_ask_for_the_head_alone(client: TestClient, engine: FakeEngine) -> None:
    for path in ("/health", "/ready", "/version", "/load", "/metrics", "/v1/models"):
        head, whole = client.head(path), client.get(path)
        assert (head.status_code, head.content) == (200, b"") and head.headers["content-type"] == (
            whole.headers["content-type"]
        )
    engine.healthy = False
    response = client.head("/health")
    assert (response.status_code, response.content) == (503, b"")


@pytest.mark.parametrize("path", ["/", "/nope", "/v1", "/v1/nope", "/v1/completions/", "/health/"])
def test_unknown_paths_are_404(client: TestClient, path: str) -> None:
    error_of(client.get(path, follow_redirects=False), 404)
    error_of(client.post(path, content=b"{}", follow_redirects=False), 404)


def test_oversized_bodies_are_413_with_the_limit(client: TestClient) -> None:
    headers = {"content-type": "application/json"}
    body = b'{"prompt": "' + b"x" * MAX_BODY_BYTES + b'"}'
    declared = client.post(COMPLETIONS, content=body, headers=headers)
    chunked = client.post(COMPLETIONS, content=iter([body]), headers=headers)
    for response in (declared, chunked):
        assert str(MAX_BODY_BYTES) in error_of(response, 413)["message"]


def test_full_queue_is_429_for_streams_too() -> None:
    engine = FakeEngine(max_waiting=2, num_waiting=1)
    with TestClient(make_app(engine)) as client:
        for stream in (False, True):
            response = client.post(COMPLETIONS, json={"prompt": ["a", "b"], "stream": stream})
            error = error_of(response, 429)
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    assert not engine.live, "the prompt that did get in must be dropped"


def test_more_prompts_than_the_queue_can_ever_take_are_400_not_429_for_ever() -> None:
    with TestClient(make_app(FakeEngine(max_waiting=2))) as client:
        error = error_of(client.post(COMPLETIONS, json={"prompt": ["a", "b", "c"]}), 400)
        assert error["param"] == "prompt" and "at most 2" in error["message"]
        assert client.post(COMPLETIONS, json={"prompt": ["a", "b"]}).status_code == 200


def test_stopped_engine_is_503_everywhere(client: TestClient, engine: FakeEngine) -> None:
    assert client.get("/health").status_code == 200
    assert client.head("/health").status_code == 200
    engine.healthy = False
    error_of(client.get("/health"), 503)
    for stream in (False, True):
        error = error_of(client.post(COMPLETIONS, json={"prompt": "a", "stream": stream}), 503)
        assert error["type"] == "server_error"


def test_bugs_are_500_without_details(client: TestClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(request: object) -> None:
        raise ZeroDivisionError("in /secret/engine.py")

    monkeypatch.setattr(engine, "submit_choices", broken)
    error_of(client.post(COMPLETIONS, json={"prompt": "a"}), 500)


def test_models_tell_the_context_limit() -> None:
    with TestClient(make_app(FakeEngine(), model_names=["org/one", "two"])) as client:
        listed = client.get("/v1/models").json()
        assert listed["object"] == "list"
        assert [card["id"] for card in listed["data"]] == ["org/one", "two"]
        assert listed["data"][0]["max_model_len"] == MAX_MODEL_LEN
        assert client.get("/v1/models/org/one").json() == listed["data"][0]
        error_of(client.get("/v1/models/three"), 404)
        for name in ("org/one", "two"):
            assert client.post(COMPLETIONS, json={"prompt": "a", "model": name}).json()["model"] == "org/one"


def test_version(client: TestClient) -> None:
    assert isinstance(client.get("/version").json()["version"], str)
