"""The Python client of OpenAI: streams, parse(), tools, log-probabilities, responses."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.serve.process import ServerProcess
from tests.serve.tiny_model import EOS_ID

HI: list[Any] = [{"role": "user", "content": "hi"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_completion_tokens": 12, "extra_body": {"ignore_eos": True}}


class Weather(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    city: Literal["Rome", "Paris"]
    days: Literal[1, 2, 3]


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=HI, **GREEDY)
    options = {"include_usage": True}
    *chunks, last = client.chat.completions.create(
        model="tiny", messages=HI, stream=True, stream_options=options, **GREEDY
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert last.usage is not None and whole.usage is not None
    assert last.usage.total_tokens == whole.usage.total_tokens
    assert whole.usage.completion_tokens == 12
    assert whole.choices[0].finish_reason == "length"


def test_log_probabilities_are_of_the_tokens(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(model="tiny", messages=HI, logprobs=True, top_logprobs=3, **GREEDY).choices[
        0
    ]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 12
    for token in choice.logprobs.content:
        assert token.logprob == max(top.logprob for top in token.top_logprobs) <= 0
        assert len(token.top_logprobs) == 3
    text = b"".join(bytes(token.bytes or b"") for token in choice.logprobs.content).decode(errors="replace")
    assert text == choice.message.content


def test_parse_gives_an_object_of_the_schema(client: openai.OpenAI, no_blanks: dict[str, Any]) -> None:
    answer = client.chat.completions.parse(
        model="tiny", messages=HI, response_format=Weather, temperature=0, logit_bias=no_blanks
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Weather)


def test_a_forced_tool_is_called_with_arguments_of_its_schema(client: openai.OpenAI) -> None:
    tools = [openai.pydantic_function_tool(Weather)]
    answer = client.chat.completions.parse(
        model="tiny", messages=HI, tools=tools, tool_choice="required", parallel_tool_calls=False, temperature=0
    )
    [call] = answer.choices[0].message.tool_calls or []
    assert call.function.name == "Weather" and isinstance(call.function.parsed_arguments, Weather)
    assert answer.choices[0].finish_reason == "tool_calls"
    with client.chat.completions.stream(
        model="tiny",
        messages=HI,
        tools=tools,
        tool_choice={"type": "function", "function": {"name": "Weather"}},
        temperature=0,
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    [streamed] = final.choices[0].message.tool_calls or []
    assert streamed.function.arguments == call.function.arguments


def test_responses_are_the_same_whole_and_streamed(client: openai.OpenAI, no_blanks: dict[str, Any]) -> None:
    ending: dict[str, Any] = {"extra_body": {"logit_bias": {str(EOS_ID): 100}, "min_tokens": 9}}
    whole = client.responses.create(model="tiny", input="hi", temperature=0, **ending)
    assert whole.status == "completed"
    with client.responses.stream(model="tiny", input="hi", temperature=0, **ending) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text == whole.output_text
    parsed = client.responses.parse(
        model="tiny", input="hi", temperature=0, text_format=Weather, extra_body={"logit_bias": no_blanks}
    )
    assert isinstance(parsed.output_parsed, Weather)
    tool: Any = {"type": "function", "name": "Weather", "parameters": Weather.model_json_schema(), "strict": True}
    [call] = client.responses.create(
        model="tiny", input="hi", temperature=0, tools=[tool], tool_choice="required", parallel_tool_calls=False
    ).output
    assert call.type == "function_call" and Weather.model_validate(json.loads(call.arguments))


def test_refusals_are_the_client_s_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nope", messages=HI)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="tiny", input="hi", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"


def test_embeddings_of_near_texts_are_near(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model="tiny", input=["one text", "one text", "another"])
    first, same, other = (item.embedding for item in answer.data)
    assert first == same != other
    assert sum(value * value for value in first) == pytest.approx(1, abs=1e-5)
