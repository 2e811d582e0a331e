"""/v1/messages: Anthropic's messages in, blocks out, whole or as events; errors in Anthropic's form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from jaxcb.serve.app import make_app

from .fake_engine import FakeEngine
from .serving import CALLS, THOUGHT, prompt_of, serving
from .sse import named_events

PATH = "/v1/messages"
BASE: dict[str, Any] = {"max_tokens": 300, "messages": [{"role": "user", "content": "hi"}]}
WEATHER = {"name": "weather", "description": "The weather.", "input_schema": {"type": "object"}}
DEEP: dict[str, Any] = json.loads('{"a":' * 300 + "1" + "}" * 300)
USE = {"type": "tool_use", "id": "a", "name": "f", "input": DEEP}
ADD = {"name": "add", "input_schema": {"type": "object"}}


def ask(client: TestClient, **fields: Any) -> dict[str, Any]:
    response = client.post(PATH, json={**BASE, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"type", "error"} and body["type"] == "error"
    assert body["error"].keys() == {"type", "message"} and body["error"]["message"]
    return body["error"]


def test_text_is_a_block() -> None:
    with serving("Paris.") as (client, engine):
        answer = ask(client, system="Be brief.")
        assert prompt_of(engine) == "system:Be brief.\nuser:hi\n"
    assert answer.pop("id").startswith("msg")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "fake-model",
        "content": [{"type": "text", "text": "Paris.", "citations": None}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 24,
            "cache_read_input_tokens": 1,
            "cache_creation_input_tokens": 0,
            "output_tokens": 7,
        },
    }


def test_calls_and_thoughts_are_blocks() -> None:
    with serving(f"<think>Hm.</think>{CALLS}", reasoning_parser="qwen3") as (client, engine):
        answer = ask(client, tools=[WEATHER, ADD])
        assert prompt_of(engine) == "tools:weather,add\nuser:hi\n"
    thinking, text, weather, add = answer["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "Hm.")
    assert (text["type"], text["text"]) == ("text", "Let me see.")
    assert (weather["type"], weather["name"], weather["input"]) == ("tool_use", "weather", {"city": "Paris"})
    assert add["input"] == {"a": [1, 2]} and add["id"] != weather["id"]
    assert answer["stop_reason"] == "tool_use"


def rebuilt(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream builds, as Anthropic's clients build it."""
    message: dict[str, Any] = {}
    pieces = ""
    for event in found:
        kind = event["type"]
        if kind == "message_start":
            message = event["message"]
        elif kind == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            pieces = ""
        elif kind == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                pieces += delta["partial_json"]
            else:
                name = {"text_delta": "text", "thinking_delta": "thinking"}[delta["type"]]
                block[name] += delta[name]
        elif kind == "content_block_stop" and pieces:
            message["content"][event["index"]]["input"] = json.loads(pieces)
        elif kind == "message_delta":
            message |= event["delta"]
            message["usage"] = event["usage"]
    return message


@pytest.mark.parametrize("answer", ["Paris.", f"<think>Hm.</think>{CALLS}", THOUGHT, ""])
def test_a_stream_builds_the_same_message(answer: str) -> None:
    with serving(answer, reasoning_parser="qwen3") as (client, _):
        whole = ask(client, tools=[WEATHER, ADD])
        found = named_events(client.post(PATH, json={**BASE, "tools": [WEATHER, ADD], "stream": True}).text)
    names = [event["type"] for event in found]
    assert names[:2] == ["message_start", "ping"] and names[-2:] == ["message_delta", "message_stop"]
    assert found[0]["message"]["usage"]["input_tokens"] > 0
    message = rebuilt(found)
    for one in (message, whole):
        one.pop("id")
        for block in one["content"]:
            block.pop("id", None)
    assert message == whole


def test_limits_and_stop_sequences_are_told_apart() -> None:
    with serving("Paris.") as (client, engine):
        assert ask(client, max_tokens=3)["stop_reason"] == "max_tokens"
        stopped = ask(client, stop_sequences=["i"])
        assert engine.requests[-1].sampling.stop == ("i",)
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "i")
    assert stopped["content"][0]["text"] == "Par"


def test_a_conversation_goes_back_block_by_block() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c", "name": "weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c",
                    "content": [{"type": "text", "text": "no"}],
                    "is_error": True,
                },
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    with serving("Sunny.") as (client, engine):
        ask(client, messages=messages, tools=[WEATHER])
        assert prompt_of(engine) == (
            "tools:weather\nuser:Weather?\nassistant:I look.<weather{'city': 'Rome'}>\ntool:Error: no\nuser:And now?\n"
        )
        count = client.post(f"{PATH}/count_tokens", json={"messages": messages, "tools": [WEATHER]}).json()
        assert count == {"input_tokens": len(engine.requests[-1].prompt_token_ids)}


def test_a_last_message_of_the_assistant_is_continued() -> None:
    with serving("is.") as (client, engine):
        ask(client, messages=[*BASE["messages"], {"role": "assistant", "content": "Par"}])
        assert prompt_of(engine) == "user:hi\nassistant:Par"


def test_thinking_is_a_setting_of_the_template() -> None:
    with serving("x") as (client, engine):
        engine.tokenizer.variables |= {"enable_thinking"}
        for kind, value in (("adaptive", True), ("disabled", False)):
            ask(client, thinking={"type": kind})
            assert prompt_of(engine) == f"enable_thinking={value}\nuser:hi\n"


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
            "tool_use",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}}, "sub"),
        ({"tools": [ADD], "tool_choice": {"type": "tool"}}, "name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "thinking"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"tools": [{"name": "f", "input_schema": DEEP}]}, "tools[0]"),
        ({"messages": [{"role": "assistant", "content": [USE]}]}, "messages[0].content[0].input"),
        ({"n": 2}, "n is not"),
        ({"stop": ["x"]}, "stop is not"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_what_can_not_be_honoured_is_refused_by_name(client: TestClient, fields: dict[str, Any], word: str) -> None:
    body = {name: value for name, value in {**BASE, "max_tokens": 20, **fields}.items() if value is not None}
    for stream in (False, True):
        error = error_of(client.post(PATH, json={**body, "stream": stream}), 400)
        assert error["type"] == "invalid_request_error" and word in error["message"]


def test_other_errors_have_anthropics_form_too() -> None:
    with TestClient(make_app(FakeEngine(), api_key="k")) as client:
        assert error_of(client.post(PATH, json=BASE), 401)["type"] == "authentication_error"
        key = {"x-api-key": "k"}
        assert client.post(PATH, json={**BASE, "max_tokens": 5}, headers=key).status_code == 200
        wrong = client.post(PATH, json={**BASE, "model": "nope"}, headers=key)
        assert error_of(wrong, 404)["type"] == "not_found_error"
        error_of(client.get(PATH, headers=key), 405)
    with TestClient(make_app(FakeEngine(max_waiting=1, num_waiting=1))) as client:
        assert error_of(client.post(PATH, json={**BASE, "max_tokens": 5}), 429)["type"] == "rate_limit_error"


def test_a_failure_ends_the_stream_with_an_error_event() -> None:
    with serving("x") as (client, engine):
        engine.fails = True
        found = named_events(client.post(PATH, json={**BASE, "stream": True}).text)
    assert found[-1]["type"] == "error" and found[-1]["error"]["type"] == "api_error"


def test_an_answer_can_be_held_to_a_schema_or_a_tool() -> None:
    schema = {"type": "object"}
    wanted = {"type": "json_schema", "schema": schema}
    with serving('[{"name": "add", "arguments": {}}]') as (client, engine):
        for fields in ({"output_format": wanted}, {"output_config": {"format": wanted}}):
            ask(client, **fields)
            assert engine.requests[-1].sampling.structured_outputs.json == schema
        for choice in ({"type": "any"}, {"type": "tool", "name": "add"}):
            answer = ask(client, tools=[ADD], tool_choice=choice)
            assert (answer["stop_reason"], answer["content"][0]["name"]) == ("tool_use", "add")
            assert engine.requests[-1].sampling.structured_outputs.json["minItems"] == 1
