"""Several answers to a prompt, and log-probabilities, over both endpoints."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from starlette.testclient import TestClient

from .sse import events

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def post(client: TestClient, path: str, **body: Any) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_n_answers_of_each_prompt_come_in_order(client: TestClient) -> None:
    answer = post(client, COMPLETIONS, prompt=["ab", "cd"], n=3, max_tokens=2)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["text"] for choice in answer["choices"]] == ["ab"] * 3 + ["cd"] * 3
    assert answer["usage"]["prompt_tokens"] == 4 and answer["usage"]["completion_tokens"] == 12
    chat = post(client, CHAT, messages=MESSAGES, n=2, max_tokens=4)
    assert [choice["message"]["content"] for choice in chat["choices"]] == ["user", "user"]


def test_streams_of_several_answers_interleave_under_their_index(client: TestClient) -> None:
    body = {"prompt": ["ab", "cd"], "n": 2, "max_tokens": 4, "stream": True}
    texts: Counter[int] = Counter()
    pieces: dict[int, str] = {}
    for chunk in events(client.post(COMPLETIONS, json=body).text):
        for choice in chunk["choices"]:
            pieces[choice["index"]] = pieces.get(choice["index"], "") + choice["text"]
            texts[choice["index"]] += choice["finish_reason"] is not None
    assert pieces == {0: "abab", 1: "abab", 2: "cdcd", 3: "cdcd"}
    assert set(texts.values()) == {1}


def test_best_of_returns_the_likeliest_and_counts_all(client: TestClient) -> None:
    answer = post(client, COMPLETIONS, prompt="ab", n=2, best_of=4, max_tokens=3)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 12 and answer["usage"]["prompt_tokens"] == 2
    with_logprobs = post(client, COMPLETIONS, prompt="ab", n=2, best_of=4, max_tokens=3, logprobs=0)
    assert [choice["logprobs"]["token_logprobs"] for choice in with_logprobs["choices"]] == [[-1.0] * 3] * 2
    assert client.post(COMPLETIONS, json={"prompt": "ab", "n": 3, "best_of": 2}).json()["error"]["param"] == "best_of"
    streamed = client.post(COMPLETIONS, json={"prompt": "ab", "best_of": 2, "stream": True})
    assert streamed.status_code == 400 and streamed.json()["error"]["param"] == "best_of"
    assert client.post(CHAT, json={"messages": MESSAGES, "best_of": 2}).json()["error"]["param"] == "best_of"


def test_completions_give_logprobs_as_parallel_lists(client: TestClient) -> None:
    [choice] = post(client, COMPLETIONS, prompt="aé", max_tokens=3, logprobs=2)["choices"]
    assert choice["logprobs"] == {
        "tokens": ["a", "é", "a"],
        "token_logprobs": [-1.0, -1.0, -1.0],
        "top_logprobs": [{"a": -1.0, "b": -9999.0}, {"é": -1.0, "ê": -9999.0}, {"a": -1.0, "b": -9999.0}],
        "text_offset": [0, 1, 2],
    }
    [bare] = post(client, COMPLETIONS, prompt="ab", max_tokens=1, logprobs=0)["choices"]
    assert bare["logprobs"]["top_logprobs"] is None and bare["logprobs"]["token_logprobs"] == [-1.0]


def test_chats_give_logprobs_as_objects_with_their_bytes(client: TestClient) -> None:
    [choice] = post(
        client, CHAT, messages=[{"role": "user", "content": "é"}], max_tokens=6, logprobs=True, top_logprobs=1
    )["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == list("user:é")
    assert content[-1] == {
        "token": "é",
        "logprob": -1.0,
        "bytes": [195, 169],
        "top_logprobs": [{"token": "é", "logprob": -1.0, "bytes": [195, 169]}],
    }
    error = client.post(CHAT, json={"messages": MESSAGES, "top_logprobs": 1}).json()["error"]
    assert error["param"] == "top_logprobs"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_streamed_logprobs_concatenate_to_the_whole(client: TestClient, path: str) -> None:
    body: dict[str, Any] = {"max_tokens": 5}
    body |= {"messages": MESSAGES, "logprobs": True} if path == CHAT else {"prompt": "abc", "logprobs": 1}
    [whole] = post(client, path, **body)["choices"]
    seen: list[Any] = []
    offsets: list[int] = []
    for chunk in events(client.post(path, json={**body, "stream": True}).text):
        logprobs = chunk["choices"][0]["logprobs"]
        if logprobs is not None:
            seen += logprobs["content"] if path == CHAT else logprobs["tokens"]
            offsets += [] if path == CHAT else logprobs["text_offset"]
    assert seen == (whole["logprobs"]["content"] if path == CHAT else whole["logprobs"]["tokens"])
    assert offsets == ([] if path == CHAT else [0, 1, 2, 3, 4])
