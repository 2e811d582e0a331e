"""echo and prompt_logprobs: the prompt, and its log-probabilities, in the answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from .fake_engine import FakeEngine
from .sse import events

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def choices(client: TestClient, path: str = COMPLETIONS, **body: Any) -> list[dict[str, Any]]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert "Infinity" not in response.text and "NaN" not in response.text
    return response.json()["choices"]


def streamed(client: TestClient, **body: Any) -> dict[int, dict[str, Any]]:
    """The choices of a stream, put together."""
    whole: dict[int, dict[str, Any]] = {}
    for chunk in events(client.post(COMPLETIONS, json=body | {"stream": True}).text):
        for choice in chunk["choices"]:
            mine = whole.setdefault(choice["index"], {"text": "", "logprobs": None})
            mine["text"] += choice["text"]
            mine["finish_reason"] = choice["finish_reason"]
            if (logprobs := choice["logprobs"]) is not None:
                mine["logprobs"] = mine["logprobs"] or {name: [] for name in logprobs}
                for name, values in logprobs.items():
                    mine["logprobs"][name] += values or []
    return whole


@pytest.mark.parametrize("prompt", ["abé", [97, 98, 233], ["abé", "cd"], [[97, 98, 233], [99, 100]]])
@pytest.mark.parametrize("n", [1, 2])
def test_text_begins_with_the_prompt_once_a_choice(client: TestClient, prompt: Any, n: int) -> None:
    """vllm-project/vllm#47815: scores and offsets of a streamed echo were off by the length of the prompt."""
    body = {"prompt": prompt, "n": n, "max_tokens": 3, "echo": True}
    found = choices(client, **body)
    texts = ["abéabé", "cdcdc"] if isinstance(prompt, list) and len(prompt) == 2 else ["abéabé"]
    assert [choice["text"] for choice in found] == [text for text in texts for _ in range(n)]
    assert all(choice["logprobs"] is None for choice in found)
    assert {index: whole["text"] for index, whole in streamed(client, **body).items()} == {
        choice["index"]: choice["text"] for choice in found
    }


@pytest.mark.parametrize("k", [0, 2])
def test_scores_cover_the_prompt_and_the_answer(client: TestClient, k: int) -> None:
    """ggml-org/llama.cpp#27174: echo with logprobs gave the answer's scores alone."""
    body = {"prompt": ["abé", "c"], "max_tokens": 3, "echo": True, "logprobs": k}
    found = choices(client, **body)
    for choice in found:
        logprobs = choice["logprobs"]
        assert "".join(logprobs["tokens"]) == choice["text"]
        assert logprobs["token_logprobs"] == [None, *[-1.0] * (len(choice["text"]) - 1)]
        assert logprobs["text_offset"] == list(range(len(choice["text"])))
        if k:
            assert logprobs["top_logprobs"][0] is None and len(logprobs["top_logprobs"]) == len(choice["text"])
            assert min(logprobs["top_logprobs"][1].values()) == -9999.0, "minus infinity is no JSON"
        else:
            assert logprobs["top_logprobs"] is None
    for index, whole in streamed(client, **body).items():
        wanted = found[index]["logprobs"]
        assert {name: whole["logprobs"][name] or None for name in wanted} == wanted


def test_without_an_answer_the_prompt_is_scored_alone(client: TestClient) -> None:
    body = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1}
    response = client.post(COMPLETIONS, json=body).json()
    [choice] = response["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -1.0]
    assert (response["usage"]["prompt_tokens"], response["usage"]["completion_tokens"]) == (3, 0)
    whole = streamed(client, **body)[0]
    assert whole["text"] == "abc" and whole["logprobs"]["tokens"] == list("abc")
    refused = client.post(COMPLETIONS, json=body | {"min_tokens": 3}).json()["error"]
    assert (refused["param"], refused["message"]) == ("min_tokens", "min_tokens must be at most max_tokens, got 3 > 0")
    refused = client.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 0})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_prompt_logprobs_are_by_id_with_ranks(client: TestClient, engine: FakeEngine, path: str) -> None:
    body = {"prompt": "ab"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "ab"}]}
    response = client.post(path, json={**body, "max_tokens": 1, "prompt_logprobs": 2}).json()
    found = response["choices"][0]["prompt_logprobs"] if path == COMPLETIONS else response["prompt_logprobs"]
    ids = engine.requests[-1].prompt_token_ids
    assert len(found) == len(ids) and found[0] is None
    own, other = str(ids[1]), str(ids[1] + 1)
    assert found[1] == {
        own: {"logprob": -1.0, "rank": 1, "decoded_token": chr(ids[1])},
        other: {"logprob": -9999.0, "rank": 2, "decoded_token": chr(ids[1] + 1)},
    }
    plain = client.post(path, json={**body, "max_tokens": 1}).json()
    assert "prompt_logprobs" not in json.dumps(plain), "only where they were asked for"
    refused = client.post(path, json={**body, "stream": True, "prompt_logprobs": 0})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_logprobs"
    for value in (-1, 21, "all"):
        refused = client.post(path, json={**body, "prompt_logprobs": value})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_logprobs"


def test_a_prompt_of_one_token_has_no_score(client: TestClient) -> None:
    [choice] = choices(client, prompt="a", max_tokens=1, echo=True, logprobs=1, prompt_logprobs=1)
    assert choice["prompt_logprobs"] == [None]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0]
