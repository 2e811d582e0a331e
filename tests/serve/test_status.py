"""Probes, load, and the routes around prompts: /tokenize, /detokenize, /apply_template."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from jaxcb.serve.app import make_app
from jaxcb.serve.requests import MAX_COUNTED_CHARS

from .fake_engine import MAX_MODEL_LEN, PAGES, FakeEngine
from .test_app import error_of

JSON = {"content-type": "application/json"}
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "add"}}


def test_an_engine_that_makes_no_steps_is_not_alive(client: TestClient, engine: FakeEngine) -> None:
    """vllm#17972: the engine hangs, and /health stays at 200."""
    engine.stalled_s = 59.0
    assert client.get("/health").json() == {"status": "ok"}
    engine.stalled_s = 61.0
    assert error_of(client.get("/health"), 503)["code"] == "engine_stalled"


def test_an_engine_that_makes_no_steps_is_not_alive_because_another_computes_prompts_for_it(
    client: TestClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {"decode": engine.stats(), "prefill-0": engine.stats()}
    parts["prefill-0"].answers = False
    monkeypatch.setattr(engine, "stats_by_engine", lambda: parts)
    assert client.get("/health").json()["status"] == "ok"
    parts["prefill-0"].state = "stalled"
    assert client.get("/health").json()["status"] == "degraded"
    parts["prefill-0"].state, parts["decode"].state = "ok", "stalled"
    assert error_of(client.get("/health"), 503)["code"] == "engine_stalled"


def test_a_peer_that_is_lost_is_named(client: TestClient, engine: FakeEngine) -> None:
    engine.peers = {"10.0.0.1:9": True, "10.0.0.2:9": False}
    assert client.get("/health").json() == {
        "status": "degraded",
        "engines": {"0": "ok", "prefill at 10.0.0.1:9": "ok", "prefill at 10.0.0.2:9": "lost"},
    }
    metrics = client.get("/metrics").text
    assert 'jaxcb:engine_up{engine="prefill at 10.0.0.2:9",model_name="fake-model"} 0.0' in metrics


def test_ready_is_no_more_when_a_shutdown_begins_or_in_a_pause(client: TestClient, engine: FakeEngine) -> None:
    assert client.get("/ready").status_code == 200
    engine.paused = True
    assert error_of(client.get("/ready"), 503)["code"] == "engine_paused"
    assert client.get("/health").status_code == 200
    engine.paused, engine.accepting = False, False
    assert error_of(client.get("/ready"), 503)["code"] == "engine_stopped"


def test_load_tells_what_is_here() -> None:
    with TestClient(make_app(FakeEngine(num_waiting=3))) as client:
        expected = {"server_load": 3, "num_running": 0, "num_waiting": 3, "kv_cache_usage": 0 / PAGES}
        assert client.get("/load").json() == expected


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"prompt": "a é"}, "a é"),
        ({"prompt": "a", "add_special_tokens": False}, "a"),
        ({"messages": [USER]}, "user:hi\n"),
        ({"messages": [USER], "tools": [TOOL]}, "tools:add\nuser:hi\n"),
        ({"messages": [USER], "tools": [TOOL], "tool_choice": "none"}, "user:hi\n"),
        ({"messages": [USER], "continue_final_message": True}, "user:hi"),
        ({"messages": [USER], "chat_template_kwargs": {"thinking": True}}, "thinking=True\nuser:hi\n"),
    ],
)
def test_tokens_and_templates_are_those_of_a_request(client: TestClient, body: dict[str, Any], text: str) -> None:
    answer = client.post("/tokenize", json={**body, "model": "fake-model"}).json()
    ids = [ord(char) for char in text]
    assert answer == {"count": len(ids), "max_model_len": MAX_MODEL_LEN, "tokens": ids}
    assert client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": text}
    strings = client.post("/tokenize", json={**body, "return_token_strs": True}).json()["token_strs"]
    assert strings == list(text)
    if "messages" in body:
        assert client.post("/apply_template", json=body).json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": [TOOL]}, "tools"),
        ("/tokenize", {"messages": [USER], "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "max_tokens": 1}, "max_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/apply_template", {}, "messages"),
        ("/apply_template", {"messages": [USER], "prompt": "a"}, "prompt"),
        ("/apply_template", {"messages": [{"role": "user"}]}, "messages[0].content"),
    ],
)
def test_bad_questions_are_refused_by_name(client: TestClient, path: str, body: dict[str, Any], param: str) -> None:
    assert error_of(client.post(path, json=body), 400)["param"] == param


def test_the_model_must_be_the_one_that_is_served(client: TestClient) -> None:
    for path, body in (
        ("tokenize", {"prompt": "a"}),
        ("detokenize", {"tokens": []}),
        ("apply_template", {"messages": [USER]}),
    ):
        assert error_of(client.post(f"/{path}", json={**body, "model": "nope"}), 404)["param"] == "model"


def test_a_web_page_may_ask_if_its_origin_is_allowed() -> None:
    asked = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    with TestClient(make_app(FakeEngine(), allowed_origins=["https://chat.example"])) as client:
        answer = client.options("/v1/chat/completions", headers=asked)
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"
    with TestClient(make_app(FakeEngine())) as client:
        assert client.options("/v1/chat/completions", headers=asked).status_code == 405


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": "TEXT"}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "TEXT"}]}, "messages"),
        ("/v1/completions", {"prompt": ["TEXT", "TEXT"], "truncate_prompt_tokens": 5}, "prompt"),
        ("/v1/chat/completions", {"messages": [{**USER, "content": "TEXT"}], "truncate_prompt_tokens": 5}, "messages"),
        ("/v1/messages/count_tokens", {"messages": [{**USER, "content": "TEXT"}]}, "messages"),
    ],
)
def test_texts_that_need_not_fit_have_a_limit_too(client: TestClient, path: str, body: Any, param: str) -> None:
    """Megabytes would keep a core busy for a minute, and a thread of the few that read prompts."""

    def response(num_chars: int) -> Any:
        return client.post(path, content=json.dumps(body).replace("TEXT", "x" * num_chars), headers=JSON)

    assert response(1000).status_code == 200
    refused = response(MAX_COUNTED_CHARS + 1)
    assert refused.status_code == 400 and "in pieces" in refused.json()["error"]["message"]
    if not path.startswith("/v1/messages"):
        assert error_of(refused, 400)["param"] == param


def test_more_messages_than_tokens_fit_are_refused_before_the_template_reads_them(client: TestClient) -> None:
    body = {"messages": [USER] * (MAX_MODEL_LEN + 1)}
    assert error_of(client.post("/apply_template", json=body), 400)["param"] == "messages"
    assert client.post("/apply_template", json={"messages": [USER] * MAX_MODEL_LEN}).status_code == 200
    items = {"input": [{"role": "user", "content": "x"}] * (MAX_MODEL_LEN + 1)}
    assert error_of(client.post("/v1/responses", json=items), 400)["param"] == "input"
