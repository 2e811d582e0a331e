"""Tools and reasoning in /v1/chat/completions: what reaches the model, and how its answer is taken apart."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from starlette.testclient import TestClient

from .serving import CALLS, THOUGHT, prompt_of, serving
from .sse import events

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
DEEP: dict[str, Any] = json.loads('{"a":' * 300 + "1" + "}" * 300)
ADD = {"type": "function", "function": {"name": "add"}}


def ask(client: TestClient, **fields: Any) -> ChatCompletion:
    response = client.post(PATH, json={"messages": [USER], "tools": [WEATHER, ADD], **fields})
    assert response.status_code == 200, response.text
    return ChatCompletion.model_validate(response.json())


def stream(client: TestClient, **fields: Any) -> list[ChatCompletionChunk]:
    response = client.post(PATH, json={"messages": [USER], "tools": [WEATHER, ADD], "stream": True, **fields})
    assert response.status_code == 200, response.text
    return [ChatCompletionChunk.model_validate(event) for event in events(response.text)]


def refusal(client: TestClient, **fields: Any) -> dict[str, Any]:
    response = client.post(PATH, json={"messages": [USER], **fields})
    assert response.status_code == 400, response.text
    return response.json()["error"]


def test_calls_come_as_tool_calls() -> None:
    with serving(CALLS) as (client, engine):
        [choice] = ask(client).choices
        assert prompt_of(engine) == "tools:weather,add\nuser:hi\n"
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    calls = choice.message.tool_calls or []
    assert [(call.type, call.function.name, call.function.arguments) for call in calls] == [
        ("function", "weather", '{"city": "Paris"}'),
        ("function", "add", '{"a": [1, 2]}'),
    ]
    assert len({call.id for call in calls}) == 2 and all(call.id for call in calls)


def test_a_stream_says_the_same() -> None:
    with serving(CALLS) as (client, _):
        chunks = stream(client)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert (deltas[0].role, deltas[0].content, deltas[0].tool_calls) == ("assistant", "", None)
    assert "".join(delta.content or "" for delta in deltas) == "Let me see."
    calls: dict[int, list[str]] = {}
    ids: dict[int, str] = {}
    for delta in deltas:
        for call in delta.tool_calls or ():
            assert call.function is not None
            if call.id is not None:
                assert call.function.name and call.type == "function" and call.index not in ids
                ids[call.index] = call.id
                calls[call.index] = [call.function.name]
            calls[call.index].append(call.function.arguments or "")
    assert [(call[0], "".join(call[1:])) for call in calls.values()] == [
        ("weather", '{"city": "Paris"}'),
        ("add", '{"a": [1, 2]}'),
    ]
    assert len(calls[0]) > 5, "the arguments come as they are made"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]


def test_a_call_without_text_has_null_content() -> None:
    with serving('<tool_call>{"name": "add", "arguments": {}}</tool_call>') as (client, _):
        message = ask(client).choices[0].message
    assert message.content is None and len(message.tool_calls or []) == 1


def test_parallel_calls_can_be_declined() -> None:
    with serving(CALLS) as (client, _):
        assert len(ask(client, parallel_tool_calls=False).choices[0].message.tool_calls or []) == 1
        deltas = [chunk.choices[0].delta for chunk in stream(client, parallel_tool_calls=False)]
    assert {call.index for delta in deltas for call in delta.tool_calls or ()} == {0}


def test_tool_choice_none_hides_the_tools_and_reads_no_calls() -> None:
    with serving(CALLS) as (client, engine):
        choice = ask(client, tool_choice="none").choices[0]
        assert prompt_of(engine) == "user:hi\n"
    assert choice.message.content == CALLS and choice.message.tool_calls is None
    assert choice.finish_reason == "stop"


def test_an_answer_cut_short_ends_for_length() -> None:
    with serving(CALLS) as (client, _):
        choice = ask(client, max_tokens=70).choices[0]
    assert choice.finish_reason == "length"
    [call] = choice.message.tool_calls or []
    assert '{"city": "Paris"}'.startswith(call.function.arguments)


def test_calls_and_results_can_be_sent_back() -> None:
    with serving("Sunny.") as (client, engine):
        call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
        messages = [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "sun"},
        ]
        assert ask(client, messages=messages).choices[0].message.content == "Sunny."
        assert prompt_of(engine) == "tools:weather,add\nuser:hi\nassistant:<weather{'city': 'Rome'}>\ntool:sun\n"


def test_a_template_without_tools_is_given_them_as_text() -> None:
    with serving(CALLS) as (client, engine):
        engine.tokenizer.variables = {"messages"}
        messages = [
            {"role": "system", "content": "Be kind."},
            USER,
            {
                "role": "assistant",
                "tool_calls": [{"id": "c", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "sun"},
        ]
        assert len(ask(client, messages=messages).choices[0].message.tool_calls or []) == 2
        prompt = prompt_of(engine)
    assert prompt.startswith("system:Be kind.\n\nYou can call functions")
    assert json.dumps(WEATHER["function"]) in prompt
    call = 'assistant:<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    assert prompt.endswith(f"user:hi\n{call}user:<tool_response>\nsun\n</tool_response>\n")


def test_markers_that_are_special_tokens_are_not_left_out() -> None:
    with serving("x") as (client, engine):
        ask(client)
        assert engine.requests[-1].sampling.skip_special_tokens
        engine.tokenizer.special = {"<tool_call>"}
        ask(client)
        assert not engine.requests[-1].sampling.skip_special_tokens
        ask(client, tool_choice="none")
        assert engine.requests[-1].sampling.skip_special_tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function"),
        ({"tools": [ADD, ADD]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}]}, "tools[0].function"),
        ({"tools": [ADD | {"more": 1}]}, "tools[0].more"),
        ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        ({"tools": [ADD], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
        ({"messages": [USER | {"tool_call_id": "x"}]}, "messages[0]"),
        ({"messages": [USER | {"tool_calls": []}, {"role": "assistant"}]}, "messages[1].content"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(client: TestClient, fields: dict[str, Any], param: str) -> None:
    assert refusal(client, **fields)["param"] == param


@pytest.mark.parametrize("arguments", ["{", "[]", "5", '"x"', '{"a":' * 5000 + "1" + "}" * 5000, json.dumps(DEEP)])
def test_arguments_that_are_no_object_are_refused(client: TestClient, arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    error = refusal(client, messages=[{"role": "assistant", "tool_calls": [call]}])
    assert error["param"] == "messages[0].tool_calls[0].function.arguments"


def test_reasoning_comes_beside_the_content() -> None:
    with serving(THOUGHT, reasoning_parser="qwen3") as (client, _):
        answer = client.post(PATH, json={"messages": [USER]}).json()
        message = answer["choices"][0]["message"]
        chunks = stream(client, tools=None, stream_options={"include_usage": True})
        hidden = client.post(PATH, json={"messages": [USER], "include_reasoning": False}).json()
        hidden_stream = client.post(PATH, json={"messages": [USER], "include_reasoning": False, "stream": True}).text
    assert (message["content"], message["reasoning_content"]) == ("Paris.", "Hm.")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    deltas = [chunk.choices[0].delta.model_dump() for chunk in chunks[:-1]]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Hm."
    assert "".join(delta["content"] or "" for delta in deltas) == "Paris."
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens_details is not None
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == 3
    assert "reasoning_content" not in hidden_stream and "Hm" not in hidden_stream
    assert hidden["choices"][0]["message"] == {"role": "assistant", "content": "Paris.", "refusal": None}


def test_a_prompt_that_opens_the_reasoning_is_seen() -> None:
    with serving("Hm.</think>Paris.", reasoning_parser="qwen3") as (client, _):
        messages = [USER, {"role": "assistant", "content": "<think>"}]
        message = client.post(PATH, json={"messages": messages}).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Paris.", "Hm.")


def test_without_a_parser_nothing_is_taken_apart() -> None:
    with serving(THOUGHT) as (client, _):
        message = client.post(PATH, json={"messages": [USER]}).json()["choices"][0]["message"]
    assert message["content"] == THOUGHT and "reasoning_content" not in message


def test_reasoning_effort_goes_by_what_the_template_reads() -> None:
    with serving("x") as (client, engine):
        for variables, effort, line in (
            ({"reasoning_effort", "enable_thinking"}, "low", "reasoning_effort=low"),
            ({"reasoning_effort", "enable_thinking"}, "none", "enable_thinking=False"),
            ({"thinking"}, "high", "thinking=True"),
        ):
            engine.tokenizer.variables = variables
            assert client.post(PATH, json={"messages": [USER], "reasoning_effort": effort}).status_code == 200
            assert prompt_of(engine) == f"{line}\nuser:hi\n"


def test_a_message_can_be_continued() -> None:
    with serving("x") as (client, engine):
        messages = [USER, {"role": "assistant", "content": "Par"}]
        body = {"messages": messages, "continue_final_message": True}
        for more in ({}, {"add_generation_prompt": False}):
            assert client.post(PATH, json=body | more).status_code == 200
            assert prompt_of(engine) == "user:hi\nassistant:Par"


def test_log_probabilities_come_with_every_token_of_a_call() -> None:
    with serving(CALLS) as (client, _):
        chunks = stream(client, logprobs=True)
        whole = ask(client, logprobs=True).choices[0].logprobs
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    tokens = [token.token for part in parts if part for token in part.content or ()]
    assert whole is not None and tokens == [token.token for token in whole.content or ()]
    assert "".join(tokens) == CALLS + "!"


FORCED = '[{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "add", "arguments": {}}]'


@pytest.mark.parametrize("tool_choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_is_held_to_the_schemas_of_the_tools(tool_choice: Any) -> None:
    with serving(FORCED) as (client, engine):
        choice = ask(client, tool_choice=tool_choice).choices[0]
        language = engine.requests[-1].sampling.structured_outputs
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert [call.function.name for call in choice.message.tool_calls or ()] == ["weather", "add"]
    assert language is not None and language.json is not None and language.reasoning_end is None
    schema = language.json
    assert schema["type"] == "array" and schema["minItems"] == 1
    calls = schema["items"].get("anyOf", [schema["items"]])
    assert [call["properties"]["name"]["const"] for call in calls] == (
        ["weather", "add"] if tool_choice == "required" else ["weather"]
    )
    assert calls[0]["properties"]["arguments"] == WEATHER["function"]["parameters"]
    assert schema.get("maxItems") == (None if tool_choice == "required" else 1)


def test_a_model_that_reasons_does_so_before_a_forced_call() -> None:
    answer = f"<think>Hm.</think>{FORCED}"
    with serving(answer, reasoning_parser="qwen3") as (client, engine):
        message = ask(client, tool_choice="required").choices[0].message
        assert engine.requests[-1].sampling.structured_outputs.reasoning_end == "</think>"
        ask(client, tools=None, response_format={"type": "json_object"})
        assert engine.requests[-1].sampling.structured_outputs.reasoning_end == "</think>"
        closed = {"messages": [USER, {"role": "assistant", "content": "<think></think>"}]}
        ask(client, tools=None, response_format={"type": "json_object"}, continue_final_message=True, **closed)
        assert engine.requests[-1].sampling.structured_outputs.reasoning_end is None
    assert len(message.tool_calls or []) == 2 and message.model_dump()["reasoning_content"] == "Hm."


def test_strict_tools_are_held_to_their_schemas_where_the_model_calls_them() -> None:
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    with serving("x") as (client, engine):
        ask(client, tools=[strict, ADD])
        tag = engine.requests[-1].sampling.structured_outputs.structural_tag
        assert prompt_of(engine) == "tools:weather,add\nuser:hi\n"
        ask(client, tools=[strict], tool_choice="none")
        assert engine.requests[-1].sampling.structured_outputs is None
    assert tag["triggers"] == ["<tool_call>"]
    assert tag["structures"][0] == {
        "begin": '<tool_call>\n{"name": "weather", "arguments": ',
        "schema": WEATHER["function"]["parameters"],
        "end": "}\n</tool_call>",
    }
    with serving("x", tool_call_parser="pythonic") as (client, _):
        assert refusal(client, tools=[strict])["param"] == "tools"


def test_a_forced_call_and_a_format_are_two_things() -> None:
    with serving("x") as (client, _):
        fields = {"tools": [ADD], "tool_choice": "required", "response_format": {"type": "json_object"}}
        assert refusal(client, **fields)["param"] == "tool_choice"
        bad = {"type": "function", "function": {"name": "f", "parameters": {"uniqueItems": True}}}
        error = refusal(client, tools=[ADD, bad], tool_choice="required")
        assert error["param"] == "tools[1]"
        assert error["message"].startswith("tools[1]: the schema of 'f' uniqueItems")


def test_a_beam_search_takes_no_tools(client: TestClient) -> None:
    assert refusal(client, use_beam_search=True, tools=[ADD])["param"] == "tools"
