"""With --api-key every path under /v1, known or not, asks for the key."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from jaxcb.serve.app import make_app
from jaxcb.serve.endpoints import ENDPOINTS

from .fake_engine import FakeEngine


@pytest.fixture
def client() -> Iterator[TestClient]:
    with TestClient(make_app(FakeEngine(), api_key="s3cret")) as client:
        yield client


@pytest.mark.parametrize(
    "header", [None, "", "s3cret", "Bearer", "Bearer ", "Bearer s3cre", "Bearer s3cret2", "Basic s3cret", "Bearer \xe9"]
)
@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        "/v1/models/x",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/nope",
    ],
)
def test_v1_is_closed_without_the_key(client: TestClient, path: str, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header.encode("latin-1")}
    for method in ("GET", "POST"):
        response = client.request(method, path, headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"


def test_v1_opens_with_the_key(client: TestClient) -> None:
    headers = {"authorization": "Bearer s3cret"}
    assert client.get("/v1/models", headers=headers).status_code == 200
    assert client.get("/v1/models", headers={"authorization": "bearer s3cret"}).status_code == 200
    both = {"authorization": "Basic s3cret", "x-api-key": "s3cret"}
    assert client.get("/v1/models", headers=both).status_code == 401
    assert client.post("/v1/completions", json={"prompt": "a"}, headers=headers).status_code == 200
    assert client.get("/v1/nope", headers=headers).status_code == 404


def test_probes_stay_open(client: TestClient) -> None:
    for path in ("/health", "/ready", "/load", "/metrics", "/version", "/openapi.json"):
        assert client.get(path).status_code == 200


def test_every_path_that_takes_a_prompt_asks_for_the_key(client: TestClient) -> None:
    for endpoint in ENDPOINTS:
        if endpoint.key == "api":
            path = endpoint.path.replace("{name:path}", "x")
            assert client.request(endpoint.method, path, json={}).status_code == 401
            assert client.request(endpoint.method, path, json={}, headers={"x-api-key": "s3cret"}).status_code != 401
            assert client.request(endpoint.method, path, json={}, headers={"x-api-key": "s3cre"}).status_code == 401
        else:
            assert not endpoint.fields or endpoint.key == "admin"
