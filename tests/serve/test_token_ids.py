"""vLLM's extras about tokens: prompts cut on the left, ids beside the text."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from .fake_engine import MAX_MODEL_LEN, FakeEngine
from .serving import CALLS, prompt_of, serving
from .sse import events
from .test_fields import BASE, BOTH, CHAT, COMPLETIONS, refusal


@BOTH
@pytest.mark.parametrize(("count", "kept"), [(3, 3), (1, 1), (-1, MAX_MODEL_LEN - 1), (100, 100)])
def test_the_last_tokens_of_a_prompt_are_kept(
    client: TestClient, engine: FakeEngine, path: str, count: int, kept: int
) -> None:
    text = "".join(chr(97 + i % 26) for i in range(500))
    given: dict[str, Any] = (
        {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    )
    whole = text if path == COMPLETIONS else f"user:{text}\n"
    body = {**given, "truncate_prompt_tokens": count, "max_tokens": 1}
    assert client.post(path, json=body).status_code == 200
    assert prompt_of(engine) == whole[-kept:]
    if path == COMPLETIONS:
        echoed = client.post(path, json={**body, "echo": True, "max_tokens": 0}).json()["choices"][0]["text"]
        assert echoed == text[-kept:]
        assert client.post(path, json={**body, "prompt": [[97, 98, 99, 100]]}).status_code == 200
        assert prompt_of(engine) == "abcd"[-kept:]


@BOTH
@pytest.mark.parametrize("count", [0, -2, MAX_MODEL_LEN])
def test_a_length_that_no_prompt_can_have_is_refused(client: TestClient, path: str, count: int) -> None:
    assert refusal(client, path, truncate_prompt_tokens=count)["param"] == "truncate_prompt_tokens"


@BOTH
def test_ids_come_back_beside_the_text(path: str) -> None:
    fields = {**BASE[path], "return_token_ids": True, "max_tokens": 200}
    if path == CHAT:
        fields["tools"] = [{"type": "function", "function": {"name": name}} for name in ("weather", "add")]
    with serving(CALLS) as (client, engine):
        whole = client.post(path, json=fields).json()
        prompt = list(engine.requests[-1].prompt_token_ids)
        chunks = events(client.post(path, json={**fields, "stream": True}).text)
        plain = client.post(path, json={**BASE[path], "stream": True}).text
    ids = [ord(char) for char in CALLS + "!"]
    choice = whole["choices"][0]
    assert choice["token_ids"] == ids
    assert (whole if path == CHAT else choice)["prompt_token_ids"] == prompt
    parts = [chunk["choices"][0] for chunk in chunks]
    assert [token for part in parts for token in part.get("token_ids", ())] == ids
    firsts = [place["prompt_token_ids"] for place in (*chunks, *parts) if "prompt_token_ids" in place]
    assert firsts == [prompt]
    assert "token_ids" not in plain
