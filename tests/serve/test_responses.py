"""/v1/responses: items in, items out, whole or built by events."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from starlette.testclient import TestClient

from .serving import CALLS, THOUGHT, prompt_of, serving
from .sse import named_events
from .test_app import error_of

PATH = "/v1/responses"
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": None}
ADD = {"type": "function", "name": "add"}
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def ask(client: TestClient, given: Any = "hi", **fields: Any) -> Response:
    response = client.post(PATH, json={"input": given, **fields})
    assert response.status_code == 200, response.text
    return Response.model_validate(response.json())


def stream(client: TestClient, **fields: Any) -> list[dict[str, Any]]:
    response = client.post(PATH, json={"input": "hi", "stream": True, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found = named_events(response.text)
    for event in found:
        EVENTS.validate_python(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def without_ids(value: Any) -> Any:
    """The same without what differs from call to call."""
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    if isinstance(value, dict):
        names = ("id", "call_id", "created_at")
        return {name: without_ids(item) for name, item in value.items() if name not in names}
    return value


def test_text_is_a_message() -> None:
    with serving("Paris.") as (client, engine):
        answer = ask(client, instructions="Be brief.", metadata={"run": "1"}, user="me")
        assert prompt_of(engine) == "system:Be brief.\nuser:hi\n"
    assert (answer.object, answer.status, answer.output_text) == ("response", "completed", "Paris.")
    assert (answer.instructions, answer.metadata, answer.user) == ("Be brief.", {"run": "1"}, "me")
    assert answer.id.startswith("resp_")
    [message] = answer.output
    assert message.type == "message" and message.status == "completed"
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (25, 7)
    assert answer.usage.input_tokens_details.cached_tokens == 1


def test_calls_and_reasoning_are_items_of_their_own() -> None:
    with serving(f"<think>Hm.</think>{CALLS}", reasoning_parser="qwen3") as (client, engine):
        answer = ask(client, tools=[WEATHER, ADD])
        assert prompt_of(engine) == "tools:weather,add\nuser:hi\n"
    kinds = [item.type for item in answer.output]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    first = answer.output[2]
    assert first.type == "function_call"
    assert (first.name, first.arguments, first.status) == ("weather", '{"city": "Paris"}', "completed")
    assert answer.usage is not None and answer.usage.output_tokens_details.reasoning_tokens == 3


@pytest.mark.parametrize("answer", ["Paris.", f"<think>Hm.</think>{CALLS}", THOUGHT, ""])
@pytest.mark.parametrize("limit", [None, 40])
def test_a_stream_builds_the_same_answer(answer: str, limit: int | None) -> None:
    fields: dict[str, Any] = {"tools": [WEATHER, ADD], "max_output_tokens": limit}
    with serving(answer, reasoning_parser="qwen3") as (client, _):
        whole = client.post(PATH, json={"input": "hi", **fields}).json()
        found = stream(client, **fields)
    names = [event["type"] for event in found]
    assert names[:2] == ["response.created", "response.in_progress"]
    assert names[-1] == ("response.incomplete" if limit and len(answer) > limit else "response.completed")
    assert without_ids(found[-1]["response"]) == without_ids(whole)
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert done == found[-1]["response"]["output"]
    for index, item in enumerate(done):
        own = [event for event in found if event.get("output_index") == index]
        assert own[0]["type"] == "response.output_item.added" and own[0]["item"]["status"] == "in_progress"
        text = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        assert text == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        assert {event["item_id"] for event in own if "item_id" in event} == {item["id"]}


@pytest.mark.parametrize("answer", ["Paris.", f"<think>Hm.</think>{CALLS} Done.", "<think>Hm", "a <tool\n b <<"])
def test_log_probabilities_are_those_of_the_messages(answer: str) -> None:
    """Of their tokens (here: characters) and no others, the same whole and streamed."""
    fields = {"tools": [WEATHER, ADD], "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    with serving(answer, reasoning_parser="qwen3") as (client, engine):
        engine.tokenizer.special = {"!"}  # the end
        whole = ask(client, **fields)
        found = stream(client, **fields)
        plain = ask(client, tools=[WEATHER, ADD])
    assert (whole.top_logprobs, plain.top_logprobs) == (2, 0)
    messages = [item for item in whole.output if item.type == "message"]
    assert len(messages) == {"P": 1, "a": 1}.get(answer[0], 2 if CALLS in answer else 0)
    deltas = iter([event for event in found if event["type"] == "response.output_text.delta"])
    dones = [event for event in found if event["type"] == "response.output_text.done"]
    for item, done in zip(messages, dones, strict=True):
        [part] = item.content
        assert part.type == "output_text" and part.logprobs
        said = [token.model_dump() for token in part.logprobs]
        assert "".join(token["token"] for token in said) == part.text
        assert {(token["logprob"], len(token["top_logprobs"])) for token in said} == {(-1.0, 2)}
        assert done["logprobs"] == said
        streamed: list[Any] = []
        while len(streamed) < len(said):
            streamed += next(deltas)["logprobs"]
        assert streamed == said
    for item in plain.output:
        assert item.type != "message" or item.content[0].logprobs == []  # type: ignore[union-attr]  # it is text


def test_the_limit_makes_an_answer_incomplete() -> None:
    with serving("Paris.") as (client, engine):
        answer = ask(client, max_output_tokens=3)
        assert engine.requests[-1].sampling.max_tokens == 3
    assert answer.status == "incomplete" and answer.output_text == "Par"
    assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"


def test_a_conversation_goes_back_item_by_item() -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "type": "message",
            "id": "msg",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "id": "fc", "call_id": "c", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c", "output": "sun"},
    ]
    with serving("Sunny.") as (client, engine):
        assert ask(client, items, tools=[WEATHER]).output_text == "Sunny."
        assert prompt_of(engine) == (
            "tools:weather\nsystem:Be brief.\nuser:Weather?\nassistant:I look.<weather{'city': 'Rome'}>\ntool:sun\n"
        )


def test_sampling_fields_reach_the_engine() -> None:
    with serving("x") as (client, engine):
        ask(client, temperature=0.5, top_p=0.25, seed=3, top_k=4, stop=["y"], ignore_eos=False)
        sampling = engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.top_k) == (0.5, 0.25, 3, 4)
    assert sampling.stop == ("y",)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "user"}]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]}, "input[0].arguments"),
        ({"input": "hi", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "hi", "conversation": "c"}, "conversation"),
        ({"input": "hi", "store": True}, "store"),
        ({"input": "hi", "background": True}, "background"),
        ({"input": "hi", "include": ["reasoning.encrypted_content"]}, "include"),
        ({"input": "hi", "top_logprobs": 2}, "top_logprobs"),
        ({"input": "hi", "top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"input": "hi", "truncation": "auto"}, "truncation"),
        ({"input": "hi", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "hi", "tools": [ADD, ADD]}, "tools"),
        ({"input": "hi", "tool_choice": "required"}, "tool_choice"),
        ({"input": "hi", "tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice"),
        ({"input": "hi", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "hi", "max_output_tokens": 10**6}, "max_output_tokens"),
        ({"input": "hi", "max_tokens": 3}, "max_tokens"),
        ({"input": "hi", "max_output_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ({"input": [{"role": "user", "content": "x" * 500}]}, "input"),
        ({"input": "hi", "n": 2}, "n"),
        ({"input": "hi", "temperature": 1000}, "temperature"),
        ({"input": "hi", "text": {"verbosity": "high"}}, "text"),
        ({"input": "hi", "reasoning": {"summary": "detailed"}}, "reasoning"),
        ({"input": "hi", "reasoning": {"effort": "low"}}, "reasoning_effort"),
        ({"input": "hi", "stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"input": "hi", "nonsense": 1}, "nonsense"),
        ({}, "input"),
    ],
)
def test_what_can_not_be_honoured_is_refused_by_name(client: TestClient, fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        error = error_of(client.post(PATH, json={**fields, "stream": stream}), 400)
        if "stream_options" not in fields or not stream:
            assert error["param"] == param
            break


def test_a_failure_ends_the_stream_with_response_failed() -> None:
    with serving("x", tool_call_parser="none") as (client, engine):
        engine.tokenizer.chat_template = "fake"
        response = client.post(PATH, json={"input": [{"role": "user", "content": "x"}], "stream": True})
        assert response.status_code == 200
        engine.fails = True
        found = named_events(client.post(PATH, json={"input": "x", "stream": True}).text)
        engine.healthy = True
        error = error_of(client.post(PATH, json={"input": "x"}), 500)
    assert error["code"] == "engine_error"
    assert found[-1]["type"] == "response.failed"
    assert found[-1]["response"]["status"] == "failed"
    assert found[-1]["response"]["error"]["code"] == "engine_error"
    EVENTS.validate_python(found[-1] | {"response": found[-1]["response"] | {"error": None}})


def test_a_text_format_holds_the_answer_to_a_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    with serving("{}") as (client, engine):
        answer = ask(client, text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}})
        assert engine.requests[-1].sampling.structured_outputs.json == schema
        assert answer.text is not None and answer.text.format is not None and answer.text.format.type == "json_schema"
        for given, param in (
            ({"type": "json_schema", "name": "x"}, "text.format.schema"),
            ({"type": "xml"}, "text.format.type"),
            ({"type": "json_schema", "schema": {}, "mode": 1}, "text.format.mode"),
        ):
            response = client.post(PATH, json={"input": "hi", "text": {"format": given}})
            assert error_of(response, 400)["param"] == param


def test_a_call_can_be_forced() -> None:
    with serving('[{"name": "add", "arguments": {}}]') as (client, engine):
        answer = ask(client, tools=[WEATHER, ADD], tool_choice={"type": "function", "name": "add"})
        assert engine.requests[-1].sampling.structured_outputs.json["maxItems"] == 1
    assert [item.type for item in answer.output] == ["function_call"]
