"""The OpenAPI document is true: routes and fields are walked from the document to the server and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount, Route
from starlette.testclient import TestClient

from jaxcb.serve.app import make_app
from jaxcb.serve.endpoints import ENDPOINTS, Endpoint
from jaxcb.serve.openapi import public_path

from .fake_engine import FakeEngine

KEY = {"authorization": "Bearer k"}
USER = {"role": "user", "content": "hi!"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "hi!"},
    "/v1/responses": {"input": "hi!"},
    "/v1/messages": {"messages": [USER], "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/v1/embeddings": {"input": "hi"},
    "/v1/score": {"context": "hi", "continuation": "x"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [50]},
    "/apply_template": {"messages": [USER]},
    "/log_level": {"level": "info"},
}
POSTS = [one for one in ENDPOINTS if one.fields]
ALL_FIELDS = {name for one in POSTS for struct in one.fields for name in struct.__struct_fields__}


@pytest.fixture(scope="module")
def app() -> Starlette:
    return make_app(FakeEngine(), admin_api_key="k")


@pytest.fixture(scope="module")
def client(app: Starlette) -> Iterator[TestClient]:
    with TestClient(app, headers=KEY) as client:
        yield client


@pytest.fixture(scope="module")
def document(client: TestClient) -> dict[str, Any]:
    return client.get("/openapi.json").json()


def routes_of(app: Starlette) -> set[tuple[str, str]]:
    """(path, method) of every route that the application has."""
    found = set()
    for route in app.routes:
        inner = route.app.routes if isinstance(route, Mount) else [route]
        prefix = route.path if isinstance(route, Mount) else ""
        for one in inner:
            assert isinstance(one, Route)
            found |= {(prefix + one.path, method) for method in (one.methods or set()) - {"HEAD"}}
    return found


def body_of(document: dict[str, Any], endpoint: Endpoint) -> dict[str, Any]:
    operation = document["paths"][public_path(endpoint.path)]["post"]
    return operation["requestBody"]["content"]["application/json"]["schema"]


def test_every_route_is_in_the_document_and_every_path_of_it_is_a_route(
    app: Starlette, document: dict[str, Any]
) -> None:
    listed = {(path, method.upper()) for path, methods in document["paths"].items() for method in methods}
    served = {(public_path(path), method) for path, method in routes_of(app)}
    assert listed == served - {("/openapi.json", "GET")}


def test_without_an_admin_key_the_document_has_no_admin_routes() -> None:
    with TestClient(make_app(FakeEngine())) as client:
        paths = client.get("/openapi.json").json()["paths"]
    assert not [one.path for one in ENDPOINTS if one.key == "admin" and one.path in paths]


@pytest.mark.parametrize("endpoint", POSTS, ids=lambda one: one.path)
def test_every_listed_field_is_known_and_every_other_is_not(
    client: TestClient, document: dict[str, Any], endpoint: Endpoint
) -> None:
    """A value of no fitting type must be refused for its type, which tells that the field itself is known."""
    schema = body_of(document, endpoint)
    for name in schema["properties"]:
        response = client.post(endpoint.path, json={**BODIES[endpoint.path], name: {"x": [{}]}})
        assert response.status_code in (200, 400), (name, response.text)
        text = response.text
        assert f'unknown field {name}"' not in text and f"{name} is not supported: leave" not in text, (name, text)
        nulled = client.post(endpoint.path, json={**BODIES[endpoint.path], name: None})
        assert (nulled.status_code == 200) == (name not in schema["required"]) or name in BODIES[endpoint.path], name
    for name in ALL_FIELDS | {"nonsense", "", "suffix", "functions", "mcp_servers"}:
        if name not in schema["properties"]:
            response = client.post(endpoint.path, json={**BODIES[endpoint.path], name: {"x": [{}]}})
            assert response.status_code == 400
            message = response.json()["error"]["message"]
            assert f"unknown field {name}" in message or f"{name} is not supported" in message, (name, message)


@pytest.mark.parametrize("endpoint", POSTS, ids=lambda one: one.path)
def test_required_fields_are_required_and_no_others(
    client: TestClient, document: dict[str, Any], endpoint: Endpoint
) -> None:
    body = BODIES[endpoint.path]
    assert client.post(endpoint.path, json=body).status_code == 200
    for name in body_of(document, endpoint)["required"]:
        assert client.post(endpoint.path, json={key: body[key] for key in body if key != name}).status_code == 400


def check(value: Any, schema: dict[str, Any], document: dict[str, Any], where: str = "$") -> None:
    """Assert that a JSON value fits a schema of the kinds that the document uses."""
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        failures = []
        for one in schema["anyOf"]:
            try:
                check(value, one, document, where)
                return
            except AssertionError as error:
                failures.append(error)
        raise AssertionError(f"{where}: {value!r} fits none: {failures}")
    if "enum" in schema:
        assert value in schema["enum"], where
    kinds = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None)}
    kinds |= {"object": dict, "array": list}
    if "type" in schema:
        assert isinstance(value, kinds[schema["type"]]), f"{where}: {value!r} is no {schema['type']}"
    if isinstance(value, dict) and "properties" in schema:
        assert value.keys() <= schema["properties"].keys(), f"{where}: {value.keys() - schema['properties'].keys()}"
        assert set(schema.get("required", [])) <= value.keys(), where
        for name, item in value.items():
            check(item, schema["properties"][name], document, f"{where}.{name}")
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            check(item, schema["items"], document, f"{where}[{index}]")


@pytest.mark.parametrize(
    "endpoint", [one for one in ENDPOINTS if one.answer and one.key != "admin"], ids=lambda one: one.path
)
def test_answers_fit_their_schemas(client: TestClient, document: dict[str, Any], endpoint: Endpoint) -> None:
    path = endpoint.path.replace("{name:path}", "fake-model")
    response = client.request(endpoint.method, path, json=BODIES.get(endpoint.path))
    assert response.status_code == 200
    operation = document["paths"][public_path(endpoint.path)][endpoint.method.lower()]
    check(response.json(), operation["responses"]["200"]["content"]["application/json"]["schema"], document)
    if endpoint.method == "POST":
        refused = client.post(path, json={"nonsense": 1}).json()
        check(refused, operation["responses"]["default"]["content"]["application/json"]["schema"], document)
