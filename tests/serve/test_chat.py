"""/v1/chat/completions: messages in, an assistant's message out, whole or in chunks."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from starlette.testclient import TestClient

from .fake_engine import FakeEngine
from .sse import events

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "hi!"}


def prompt_text(engine: FakeEngine) -> str:
    return "".join(map(chr, engine.requests[-1].prompt_token_ids))


def test_answer_has_openais_form(client: TestClient) -> None:
    response = client.post(PATH, json={"messages": [USER]})
    answer = ChatCompletion.model_validate(response.json(), strict=False)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    [choice] = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content) == ("assistant", "user:hi")
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (9, 8, 17)
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


def test_stream_has_the_role_first_one_id_and_the_finish_last(client: TestClient) -> None:
    response = client.post(PATH, json={"messages": [USER], "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = [ChatCompletionChunk.model_validate(event) for event in events(response.text)]
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert not chunks[0].choices[0].delta.content
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "user:hi"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all("usage" not in event for event in events(response.text))


def test_usage_chunk_comes_last_when_asked_for(client: TestClient) -> None:
    body = {"messages": [USER], "stream": True, "stream_options": {"include_usage": True}}
    chunks = events(client.post(PATH, json=body).text)
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == client.post(PATH, json={"messages": [USER]}).json()["usage"]


def test_answer_goes_to_the_context_limit_by_default(client: TestClient, engine: FakeEngine) -> None:
    client.post(PATH, json={"messages": [USER]})
    assert engine.requests[-1].sampling.max_tokens is None
    for fields in ({"max_tokens": 3}, {"max_completion_tokens": 3}, {"max_tokens": 3, "max_completion_tokens": 3}):
        answer = client.post(PATH, json={"messages": [USER], **fields}).json()
        assert answer["usage"]["completion_tokens"] == 3
        assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 1000}, "max_completion_tokens"),
        ({"max_tokens": 1000}, "max_tokens"),
    ],
)
def test_limits_that_make_no_sense_are_refused(client: TestClient, fields: dict[str, int], param: str) -> None:
    response = client.post(PATH, json={"messages": [USER], **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "user", "content": ""}, "user:\n"),
        ({"role": "user", "content": []}, "user:\n"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "user:a\nb\n"),
        ({"role": "developer", "content": "x"}, "system:x\n"),
        ({"role": "system", "content": "x"}, "system:x\n"),
        ({"role": "user", "content": "x", "name": "ann"}, "user:x\n"),
    ],
)
def test_messages_reach_the_template(client: TestClient, engine: FakeEngine, message: Any, text: str) -> None:
    assert client.post(PATH, json={"messages": [message], "max_tokens": 1}).status_code == 200
    assert prompt_text(engine) == text


def test_an_answer_can_be_sent_back(client: TestClient, engine: FakeEngine) -> None:
    answer = client.post(PATH, json={"messages": [USER]}).json()["choices"][0]["message"]
    full = {**answer, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    for message in (answer, full):
        assert client.post(PATH, json={"messages": [USER, message, USER]}).status_code == 200
        assert prompt_text(engine) == "user:hi!\nassistant:user:hi\nuser:hi!\n"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([USER, {"role": "user"}], "messages[1].content"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "tool", "content": "x"}], "messages[0]"),
        ([{"role": 5, "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "x", "mood": "good"}], "messages[0].mood"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls[0].id"),
    ],
)
def test_bad_messages_are_refused_by_place(client: TestClient, messages: Any, param: str) -> None:
    response = client.post(PATH, json={"messages": messages})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("stream", [False, True])
def test_a_template_that_refuses_is_400(client: TestClient, engine: FakeEngine, stream: bool) -> None:
    engine.tokenizer.chat_template = "raise"
    response = client.post(PATH, json={"messages": [USER], "stream": stream})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"


def test_a_prompt_that_is_too_long_is_blamed_on_messages(client: TestClient) -> None:
    response = client.post(PATH, json={"messages": [{"role": "user", "content": "x" * 500}]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"
