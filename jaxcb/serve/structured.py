"""The fields that hold an answer to a language: OpenAI's ``response_format``, vLLM's ``structured_outputs`` and the
``guided_*`` fields that it had before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from jaxcb import validation
from jaxcb.errors import RequestError
from jaxcb.serve.fields import convert
from jaxcb.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from jaxcb.engine import ServingEngine

_GUIDED = {
    "guided_json": "json",
    "guided_json_object": "json_object",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_whitespace_pattern": "whitespace_pattern",
    "structural_tag": "structural_tag",
}
"""Name of a field -> field of StructuredOutputs."""


class StructuredFields(msgspec.Struct, frozen=True, kw_only=True):
    """These fields as the OpenAPI document lists them."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    structural_tag: dict[str, Any] | str | None = None


def read_structured(fields: dict[str, Any], engine: ServingEngine) -> StructuredOutputs | None:
    """Remove these fields from a body and return what they ask for, which the engine has then compiled. Call it off the
    event loop.

    Raises:
        RequestError: a value is wrong, two of them ask for something, or it can't be compiled; ``.param`` names the
            field.
    """
    name, wanted = take_structured(fields)
    if wanted is not None:
        try:
            engine.compile_grammar(wanted)
        except RequestError as error:
            raise _of_field(error, name, f"structured_outputs.{wanted.kind}") from error
    return wanted


def take_structured(fields: dict[str, Any]) -> tuple[str, StructuredOutputs | None]:
    """Remove these fields from a body; the name of the one that asks for something, and what it asks for.

    Raises:
        RequestError: as for :func:`read_structured`.
    """
    given: dict[str, StructuredOutputs] = {}
    if (wanted := of_response_format(fields.pop("response_format", None))) is not None:
        given["response_format"] = wanted
    if (wanted := StructuredOutputs.of(fields.pop("structured_outputs", None))) is not None:
        given["structured_outputs"] = wanted
    sent = convert({name: fields.pop(name) for name in _GUIDED.keys() & fields.keys()}, StructuredFields)
    guided = {name: value for name in _GUIDED if (value := getattr(sent, name)) not in (None, False)}
    if guided:
        values = {_GUIDED[name]: value for name, value in guided.items()}
        given[" and ".join(guided)] = _named(next(iter(guided)), values)
    if len(given) > 1:
        raise RequestError(f"{' and '.join(given)} ask for two things: send one of them", param=list(given)[1])
    return next(iter(given.items()), ("", None))


def of_response_format(value: Any, name: str = "response_format") -> StructuredOutputs | None:
    """What a ``response_format`` asks for; None for text. ``name`` is that of the field, for errors.

    Raises:
        RequestError: it is malformed, or its schema is; ``.param`` names the field.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise RequestError(f"{name} must be an object, got {validation.shown(value)}", param=name)
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True)
    if kind == "json_schema":
        return _named(f"{name}.json_schema.schema", {"json": _schema(value.get("json_schema"), f"{name}.json_schema")})
    if kind == "structural_tag":
        return _named(name, {"structural_tag": {key: item for key, item in value.items() if key != "type"}})
    raise RequestError(
        f"{name}.type must be text, json_object, json_schema or structural_tag, got {validation.shown(kind)}",
        param=f"{name}.type",
    )


def _schema(value: Any, name: str) -> Any:
    """``strict: false`` asks for less than what happens anyhow."""
    if not isinstance(value, Mapping):
        raise RequestError(f"{name} must be an object with a schema, got {validation.shown(value)}", param=name)
    for field, kind in (("name", str), ("description", str), ("strict", bool)):
        if not isinstance(value.get(field), kind | None):
            raise RequestError(f"{name}.{field} must be a {kind.__name__}", param=f"{name}.{field}")
    for field in value:
        if field not in ("name", "description", "strict", "schema"):
            raise RequestError(f"unknown field {name}.{field}"[:200], param=f"{name}.{field}"[:200])
    if not isinstance(value.get("schema"), Mapping):
        raise RequestError(
            f"{name}.schema must be a JSON schema, got {validation.shown(value.get('schema'))}", param=f"{name}.schema"
        )
    return value["schema"]


def _named(name: str, values: dict[str, Any]) -> StructuredOutputs:
    """StructuredOutputs of fields, whose errors go by the name of the field in the body."""
    try:
        return StructuredOutputs(**values)
    except RequestError as error:
        raise _of_field(error, name, error.param or "structured_outputs") from error


def _of_field(error: RequestError, name: str, param: str) -> RequestError:
    """The error by the name that the body has for ``param``."""
    if name == "structured_outputs":
        return RequestError(str(error), param=error.param)
    return RequestError(str(error).replace(param, name), param=name)
