"""/v1/embeddings and /v1/score."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from openai.types import CreateEmbeddingResponse
from starlette.testclient import TestClient

from jaxcb.serve.app import make_app

from .fake_engine import FakeEngine
from .test_app import error_of

EMBEDDINGS, SCORE = "/v1/embeddings", "/v1/score"


def embed(client: TestClient, given: Any, **fields: Any) -> list[list[float]]:
    response = client.post(EMBEDDINGS, json={"input": given, **fields})
    assert response.status_code == 200, response.text
    answer = CreateEmbeddingResponse.model_validate(response.json())
    assert [item.index for item in answer.data] == list(range(len(answer.data)))
    return [item.embedding for item in answer.data]


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        ("ab", [[98, 196, 2]]),
        (["ab", "c"], [[98, 196, 2], [99, 198, 1]]),
        ([97, 98], [[98, 196, 2]]),
        ([[97], [97, 98, 99]], [[97, 194, 1], [99, 198, 3]]),
    ],
)
def test_every_text_has_a_row(client: TestClient, given: Any, rows: list[list[float]]) -> None:
    assert embed(client, given, normalize=False) == rows
    unit = np.asarray(embed(client, given))
    np.testing.assert_allclose(unit, rows / np.linalg.norm(rows, axis=1, keepdims=True), rtol=1e-6)


def test_pooling_and_base64(client: TestClient, engine: FakeEngine) -> None:
    assert embed(client, [97, 99], pooling="mean", normalize=False) == [[98, 196, 2]]
    fields = {"input": "b", "encoding_format": "base64", "normalize": False, "dimensions": 3, "user": "me"}
    answer = client.post(EMBEDDINGS, json=fields).json()
    packed = base64.b64decode(answer["data"][0]["embedding"])
    assert np.frombuffer(packed, "<f4").tolist() == [98, 196, 1]
    assert answer["usage"] == {"prompt_tokens": 1, "total_tokens": 1}
    assert engine.finished["length"] == 2


def score(client: TestClient, context: Any, continuation: Any) -> list[dict[str, Any]]:
    response = client.post(SCORE, json={"context": context, "continuation": continuation})
    assert response.status_code == 200, response.text
    return response.json()["data"]


def test_continuations_are_scored_behind_their_contexts(client: TestClient) -> None:
    """The fake engine gives every token -1."""
    [one] = score(client, "ab", "cde")
    expected = {"object": "score", "index": 0, "score": -3.0, "is_greedy": True}
    assert one == {**expected, "token_ids": [99, 100, 101], "token_logprobs": [-1.0] * 3}
    assert [item["score"] for item in score(client, "ab", ["c", "de"])] == [-1, -2]
    assert [item["score"] for item in score(client, ["a", "b"], ["c", "de"])] == [-1, -2]
    assert [item["token_ids"] for item in score(client, [97], [98, 99])] == [[98, 99]]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (EMBEDDINGS, {}, "input"),
        (EMBEDDINGS, {"input": []}, "input"),
        (EMBEDDINGS, {"input": ""}, "input"),
        (EMBEDDINGS, {"input": ["a", 5]}, "input"),
        (EMBEDDINGS, {"input": "x" * 500}, "input"),
        (EMBEDDINGS, {"input": "a", "dimensions": 2}, "dimensions"),
        (EMBEDDINGS, {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        (EMBEDDINGS, {"input": "a", "pooling": "max"}, "pooling"),
        (EMBEDDINGS, {"input": "a", "stream": True}, "stream"),
        (SCORE, {"context": "a"}, "continuation"),
        (SCORE, {"context": "", "continuation": "a"}, "context"),
        (SCORE, {"context": ["a", "b"], "continuation": ["c"]}, "context"),
        (SCORE, {"context": "a", "continuation": [5]}, "continuation"),
        (SCORE, {"context": "a", "continuation": []}, "continuation"),
        (SCORE, {"context": "x" * 500, "continuation": "a"}, "context"),
    ],
)
def test_what_can_not_be_read_is_refused_by_name(client: TestClient, path: str, body: Any, param: str) -> None:
    assert error_of(client.post(path, json=body), 400)["param"] == param


def test_they_wait_in_the_same_queue_and_fail_as_others_do() -> None:
    with TestClient(make_app(FakeEngine(max_waiting=2, num_waiting=1))) as client:
        error_of(client.post(EMBEDDINGS, json={"input": ["a", "b"]}), 429)
        assert error_of(client.post(EMBEDDINGS, json={"input": ["a", "b", "c"]}), 400)["param"] == "input"
    engine = FakeEngine()
    engine.fails = True
    with TestClient(make_app(engine)) as client:
        error_of(client.post(SCORE, json={"context": "a", "continuation": "b"}), 500)
