"""Anthropic's client: messages whole and streamed, tools, counting, errors."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.process import ServerProcess

from .conftest import needs

pytestmark = needs("anthropic")
HI: list[Any] = [{"role": "user", "content": "hi"}]
TOOL: dict[str, Any] = {
    "name": "weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Any:
    import anthropic

    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def test_a_stream_builds_the_message(client: Any) -> None:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "messages": HI, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert whole.stop_reason in ("max_tokens", "end_turn")


def test_a_forced_tool_is_used(client: Any) -> None:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "messages": HI, "tools": [TOOL]}
    asked |= {"tool_choice": {"type": "tool", "name": "weather"}, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    for message in (whole, final):
        [block] = message.content
        assert (message.stop_reason, block.type, block.name) == ("tool_use", "tool_use", "weather")
        assert block.input["city"] in ("Rome", "Paris")


def test_tokens_are_counted_and_refusals_are_the_client_s_own_errors(client: Any) -> None:
    import anthropic

    assert client.messages.count_tokens(model="tiny", messages=HI).input_tokens > 2
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="nope", max_tokens=5, messages=HI)
    with pytest.raises(anthropic.BadRequestError, match="container"):
        client.messages.create(model="tiny", max_tokens=5, messages=HI, extra_body={"container": "x"})
