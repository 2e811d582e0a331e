"""The OpenAPI document, made from the table of endpoints and the structs that read and write their bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from jaxcb.serve.endpoints import Endpoint
from jaxcb.serve.errors import AnthropicErrorBody, ErrorBody
from jaxcb.serve.status import installed_version

_REFS = "#/components/schemas/{name}"


def document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """OpenAPI 3.1, as JSON values."""
    named = [struct for one in endpoints for struct in (*one.fields, one.answer, one.chunks)]
    structs = {struct for struct in named if struct is not None and struct is not dict}
    ordered = sorted(structs | {ErrorBody, AnthropicErrorBody}, key=lambda struct: struct.__name__)
    _, schemas = msgspec.json.schema_components(ordered, ref_template=_REFS)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        operation = _operation(endpoint, schemas)
        paths.setdefault(public_path(endpoint.path), {})[endpoint.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxcb", "version": installed_version()},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "api": {"type": "http", "scheme": "bearer", "description": "with --api-key"},
                "admin": {"type": "http", "scheme": "bearer", "description": "with --admin-api-key"},
            },
        },
    }


def public_path(path: str) -> str:
    """A path of the router as OpenAPI writes it: without the kinds of its parameters."""
    return path.replace(":path}", "}")


def _operation(endpoint: Endpoint, schemas: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if endpoint.answer is not None:
        answer = {"application/json": {"schema": _ref(endpoint.answer)}}
    if endpoint.chunks is not None:
        event = {"type": "object"} if endpoint.chunks is dict else _ref(endpoint.chunks)
        answer["text/event-stream"] = {"schema": event}
    error = AnthropicErrorBody if endpoint.path.startswith("/v1/messages") else ErrorBody
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": f"{endpoint.method.lower()}_{getattr(endpoint.handler, '__name__', '')}",
        "responses": {
            "200": {"description": "The answer.", "content": answer},
            "default": {"description": "An error.", "content": {"application/json": {"schema": _ref(error)}}},
        },
    }
    if "{name" in endpoint.path:
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [name]
    if endpoint.fields:
        body = {"application/json": {"schema": body_schema(endpoint, schemas)}}
        operation["requestBody"] = {"required": True, "content": body}
    if endpoint.key != "none":
        operation["security"] = [{endpoint.key: []}]
    return operation


def body_schema(endpoint: Endpoint, schemas: dict[str, Any]) -> dict[str, Any]:
    """One object of the fields of all the structs that read the body. Any other field is refused."""
    properties: dict[str, Any] = {}
    required: list[str] = []
    for struct in endpoint.fields:
        own = schemas[struct.__name__]
        properties |= own["properties"]
        required += own.get("required", [])
    kept = {name: schema for name, schema in sorted(properties.items()) if name not in endpoint.without}
    return {"type": "object", "properties": kept, "required": required, "additionalProperties": False}


def _ref(struct: type[Any]) -> dict[str, str]:
    return {"$ref": _REFS.format(name=struct.__name__)}
