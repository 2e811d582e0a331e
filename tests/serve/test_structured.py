"""What of ``response_format``, ``structured_outputs`` and ``guided_*`` reaches the engine, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from jaxcb.sampling_params import StructuredOutputs
from jaxcb.serve.requests import CHAT_UNSUPPORTED

from .fake_engine import FakeEngine
from .test_fields import BASE, BOTH, CHAT, COMPLETIONS, refusal

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a>"]}


def schema_format(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": fields}}


@BOTH
@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            {"json": SCHEMA},
        ),
        ({"response_format": {"type": "structural_tag", **TAG}}, {"structural_tag": TAG}),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            {"structural_tag": {"format": {"type": "any_text"}}},
        ),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"json": SCHEMA, "choice": None}}, {"json": SCHEMA}),
        (
            {"structured_outputs": {"choice": ["a", "b"], "reasoning_end": "."}},
            {"choice": ("a", "b"), "reasoning_end": "."},
        ),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": " "}, {"json": SCHEMA, "whitespace_pattern": " "}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a"]}, {"choice": ("a",)}),
        ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"guided_json": None, "response_format": None, "structured_outputs": None}, None),
    ],
)
def test_what_is_asked_for_reaches_the_engine(
    client: TestClient, engine: FakeEngine, path: str, fields: dict[str, Any], wanted: dict[str, Any] | None
) -> None:
    response = client.post(path, json={**BASE[path], **fields})
    assert response.status_code == 200, response.text
    given = engine.requests[-1].sampling.structured_outputs
    assert given == (None if wanted is None else StructuredOutputs(**wanted))


@BOTH
@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"response_format": "json"}, "response_format", "object"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}},
            "response_format.json_schema.schema",
            "1",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}},
            "response_format.json_schema.x",
            "x",
        ),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"xml": 1}}, "structured_outputs.xml", "xml"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "non-empty"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
            "json",
        ),
        ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "guided_regex", "two things"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex", "exactly one"),
        ({"guided_regex": False}, "guided_regex", "expected `str | null`"),
        ({"guided_json": 0}, "guided_json", "object"),
        ({"guided_json": {"uniqueItems": True}}, "guided_json", "uniqueItems is not supported"),
        ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend", "unknown"),
    ],
)
def test_what_can_not_be_honoured_is_refused_by_name(
    client: TestClient, engine: FakeEngine, path: str, fields: dict[str, Any], param: str, reason: str
) -> None:
    error = refusal(client, path, **fields)
    assert error["param"] == param
    assert reason in error["message"]
    assert not engine.requests


def test_a_beam_search_can_not_be_held_to_a_grammar(client: TestClient) -> None:
    for path in (CHAT, COMPLETIONS):
        error = refusal(client, path, use_beam_search=True, structured_outputs={"regex": "a"})
        assert error["param"] == "structured_outputs"


def test_a_schema_nested_ten_thousand_deep_is_refused(client: TestClient) -> None:
    """As text, for the client's own JSON encoder gives up on it."""
    schema = '{"items":' * 10_000 + "{}" + "}" * 10_000
    assert "nested" in refusal(client, CHAT, guided_json=schema)["message"]
    body = b'{"messages":[{"role":"user","content":"x"}],"guided_json":' + schema.encode() + b"}"
    response = client.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400 and "nested" in response.json()["error"]["message"]


def test_the_fields_are_not_among_the_unsupported() -> None:
    assert not CHAT_UNSUPPORTED.keys() & {"response_format", "structured_outputs"}
