"""Answers that must be calls: the JSON schema that makes them so, and their parser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxcb.parsing.events import Sink
from jaxcb.parsing.json_call import JsonCall


def forced_schema(tools: Sequence[Mapping[str, Any]], name: str | None, *, parallel: bool) -> dict[str, Any]:
    """The schema of a JSON list of calls: of the function ``name``, or (None) of any of ``tools``. One call or more;
    exactly one where a name is given or parallel calls are not wanted."""
    functions = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                "arguments": function.get("parameters") or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    schema: dict[str, Any] = {
        "type": "array",
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
        "minItems": 1,
    }
    if name is not None or not parallel:
        schema["maxItems"] = 1
    return schema


class ForcedParser:
    """Reads the list of calls that the schema allows."""

    def __init__(self, sink: Sink):
        self._sink = sink
        self._call: JsonCall | None = None
        self._broken = False

    def feed(self, text: str) -> None:
        for at, char in enumerate(text):
            if self._broken:
                self._sink.text(text[at:])
                return
            if self._call is None and char == "{":
                self._call = JsonCall(self._sink)
            if self._call is not None:
                self._call.feed(char)
                if self._call.broken and not self._call.started:
                    self._broken = True
                    self._sink.text(self._call.raw)
                if self._call.done or self._call.broken:
                    self._call = None

    def finish(self) -> None:
        if self._call is not None and not self._call.started:
            self._sink.text(self._call.raw)
