"""From the bytes of a body to checked structs. Every field is honoured, known to be harmless, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from jaxcb.errors import RequestError

T = TypeVar("T")
_ERROR_PATH = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_ERROR_FIELD = re.compile(r"^Object (?P<what>contains unknown|missing required) field `(?P<name>.*)`$", re.DOTALL)


def decode_object(body: bytes) -> dict[str, Any]:
    """The JSON object in ``body``.

    Raises:
        RequestError: not JSON, not an object, or nested too deeply.
    """
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except RecursionError as error:
        raise RequestError("The body is nested too deeply") from error
    except msgspec.ValidationError as error:
        if "out of range" in str(error):  # by a path that names nothing: every value may be anything here
            raise RequestError("The body holds a number that is out of range") from error
        raise _request_error(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"The body is not valid JSON: {error}") from error


def refuse_unsupported(fields: dict[str, Any], unsupported: Mapping[str, Sequence[Any]]) -> None:
    """Remove the fields named in ``unsupported`` (name -> values that ask for nothing; null is always one of them).

    Raises:
        RequestError: one of them has another value.
    """
    for name in fields.keys() & unsupported.keys():
        value = fields.pop(name)
        neutral = unsupported[name]
        if value is None or any(_same(value, allowed) for allowed in neutral):
            continue
        accepted = " or ".join(msgspec.json.encode(allowed).decode() for allowed in neutral)
        advice = f"leave it out or send {accepted}" if accepted else "leave it out"
        raise RequestError(f"{name} is not supported: {advice}; got {repr(value)[:80]}", param=name)


def take(fields: dict[str, Any], schema: type[T]) -> T:
    """Remove the fields that the struct ``schema`` has from ``fields`` and return them checked, as the struct."""
    names = fields.keys() & set(schema.__struct_fields__)  # type: ignore[attr-defined]  # schema is a msgspec.Struct
    return convert({name: fields.pop(name) for name in names}, schema)


def only_functions(fields: Mapping[str, Any]) -> None:
    """Raise RequestError where ``tools`` holds a tool of another type than "function", whatever its fields are."""
    tools = fields.get("tools")
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        if isinstance(tool, dict) and (kind := tool.get("type")) != "function":
            param = f"tools[{index}].type"
            raise RequestError(f'{param}: only "function" is supported, got {repr(kind)[:40]}', param=param)


def convert(fields: dict[str, Any], schema: type[T]) -> T:
    """``fields`` as the struct ``schema``.

    Raises:
        RequestError: a wrong type, a missing field, or (where forbidden) an unknown one; ``.param`` names it.
    """
    try:
        return msgspec.convert(fields, schema)
    except msgspec.ValidationError as error:
        raise _request_error(error) from error


def _same(value: Any, other: Any) -> bool:
    """Equality of JSON values: 0 equals 0.0 but not false."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _request_error(error: msgspec.ValidationError) -> RequestError:
    """msgspec's message with its path turned into ``param``.

    Example: "Expected `int`, got `str` - at `$.messages[0].name`" has the param "messages[0].name".
    """
    parts = _ERROR_PATH.match(str(error))
    assert parts is not None  # the pattern matches any text
    what, path = parts["what"], parts["path"] or ""
    if field := _ERROR_FIELD.match(what):
        param = f"{path}.{field['name']}" if path else field["name"]
        kind = "unknown field" if field["what"] == "contains unknown" else "missing required field"
        return RequestError(f"{kind} {param}", param=param)
    return RequestError(f"{path or 'The body'}: {what[:1].lower()}{what[1:]}", param=path or None)
