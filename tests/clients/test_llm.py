"""The llm command, with a model of our own in extra-openai-models.yaml."""

from __future__ import annotations

from typing import Any

import httpx

from tests.serve.process import ServerProcess

from .conftest import needs

pytestmark = needs("llm")


def test_a_prompt_is_answered(server: ServerProcess, said: dict[str, Any]) -> None:
    assert isinstance(said["llm"], str), said["llm"]["error"]
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "temperature": 0}
    expected = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    assert said["llm"].strip() == expected["choices"][0]["message"]["content"].strip() != ""
