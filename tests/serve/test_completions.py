"""/v1/completions: prompts as text or ids, one or many, whole or in chunks."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import Completion
from starlette.testclient import TestClient

from .fake_engine import MAX_MODEL_LEN, FakeEngine
from .sse import events

PATH = "/v1/completions"


def ids(text: str) -> list[int]:
    return [ord(char) for char in text]


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("abc", ["abca"]),
        (ids("abc"), ["abca"]),
        (["abc", "d!", "xy"], ["abca", "d", "xyxy"]),
        ([ids("abc"), ids("d!")], ["abca", "d"]),
    ],
)
def test_every_kind_of_prompt_gives_choices_in_order(client: TestClient, prompt: Any, texts: list[str]) -> None:
    response = client.post(PATH, json={"prompt": prompt, "max_tokens": 4})
    answer = Completion.model_validate(response.json())
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == list(range(len(texts)))
    assert [choice.finish_reason for choice in answer.choices] == [
        "stop" if "d" in text else "length" for text in texts
    ]


@pytest.mark.parametrize("prompt", ["abc", ["abc", "d!", "xy"]])
def test_stream_says_what_the_whole_answer_says(client: TestClient, prompt: Any) -> None:
    body = {"prompt": prompt, "max_tokens": 4}
    whole = client.post(PATH, json=body).json()
    response = client.post(PATH, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    chunks = events(response.text)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    *chunks, last = chunks
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert [part["finish_reason"] for part in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]


def test_chunks_have_no_usage_unless_asked_for(client: TestClient) -> None:
    chunks = events(client.post(PATH, json={"prompt": "abc", "stream": True}).text)
    assert all("usage" not in chunk for chunk in chunks)


def test_usage_sums_over_prompts(client: TestClient) -> None:
    usage = client.post(PATH, json={"prompt": ["abc", "d!"], "max_tokens": 4}).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 6, 11)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


def test_sixteen_tokens_by_default(client: TestClient, engine: FakeEngine) -> None:
    assert client.post(PATH, json={"prompt": "abc"}).json()["usage"]["completion_tokens"] == 16
    assert engine.requests[-1].sampling.max_tokens == 16


def test_the_default_leaves_room_at_the_context_limit(client: TestClient) -> None:
    for room in (1, 10, 20):
        usage = client.post(PATH, json={"prompt": ["a" * (MAX_MODEL_LEN - room)]}).json()["usage"]
        assert usage["completion_tokens"] == min(room, 16)
    response = client.post(PATH, json={"prompt": "a" * (MAX_MODEL_LEN - 10), "max_tokens": 11})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "max_tokens"


def test_stop_strings_end_the_answer_and_are_named(client: TestClient) -> None:
    choice = client.post(PATH, json={"prompt": "abc", "stop": "c"}).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", "c")


@pytest.mark.parametrize(
    "prompt",
    [None, "", [], [""], [[]], ["ok", ""], [[5, 6], []], [5, "a"], ["a", [5]], [True], [1.5], {}, [[["a"]]], 5],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_prompts_are_refused_before_anything_runs(
    client: TestClient, engine: FakeEngine, prompt: Any, stream: bool
) -> None:
    response = client.post(PATH, json={"prompt": prompt, "stream": stream})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("prompt")
    assert not engine.requests


def test_too_many_prompts_are_refused(client: TestClient) -> None:
    response = client.post(PATH, json={"prompt": ["a"] * 1025})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"


def test_one_prompt_that_does_not_fit_drops_the_others(client: TestClient, engine: FakeEngine) -> None:
    response = client.post(PATH, json={"prompt": ["a", "b" * 500, "c"]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
    assert not engine.live
