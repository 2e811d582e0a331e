"""langchain-openai: messages, streams, tools, structured output."""

from __future__ import annotations

from typing import Any, Literal

import pydantic
import pytest

from tests.serve.process import ServerProcess

from .conftest import needs

pytestmark = needs("langchain_openai")


class Weather(pydantic.BaseModel):
    """The weather in a city."""

    model_config = pydantic.ConfigDict(extra="forbid")
    city: Literal["Rome", "Paris"]


@pytest.fixture(scope="module")
def chat(server: ServerProcess, no_blanks: dict[str, float]) -> Any:
    import langchain_openai

    return langchain_openai.ChatOpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        model="tiny",
        temperature=0,
        max_tokens=100,
        logit_bias=no_blanks,
        max_retries=0,
    )


def test_a_stream_says_what_the_whole_answer_says(chat: Any) -> None:
    whole = chat.invoke("hi")
    assert "".join(chunk.content for chunk in chat.stream("hi")) == whole.content
    assert whole.usage_metadata["output_tokens"] > 0


def test_tools_and_structured_output(chat: Any) -> None:
    [call] = chat.bind_tools([Weather], tool_choice="Weather").invoke("hi").tool_calls
    assert call["name"] == "Weather" and call["args"]["city"] in ("Rome", "Paris")
    assert isinstance(chat.with_structured_output(Weather, method="json_schema").invoke("hi"), Weather)
