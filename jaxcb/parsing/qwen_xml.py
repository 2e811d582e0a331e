"""The calls of Qwen3-Coder and Qwen3.5: tags around a function and around each of its parameters, whose values are
plain text. The rules are those of the parser that comes with Qwen3-Coder (``qwen3coder_tool_parser.py``)::

    <tool_call>
    <function=weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>
"""

from __future__ import annotations

import ast
import enum
import json
from collections.abc import Iterator, Mapping
from typing import Any

from jaxcb.parsing.events import Sink
from jaxcb.parsing.marks import MarkSearch

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_MAX_NAME = 256
"""Characters of a name; what is longer is none."""
_TYPES: Mapping[str, type[Any] | tuple[type[Any], ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}


class _At(enum.Enum):
    TEXT = enum.auto()
    BEGUN = enum.auto()
    """Behind ``<tool_call>``, or behind a call: white space and the next tag."""
    FUNCTION_NAME = enum.auto()
    FUNCTION = enum.auto()
    """Inside a call, outside of its parameters."""
    PARAMETER_NAME = enum.auto()
    VALUE = enum.auto()


class QwenXmlParser:
    """A block may hold several calls; the tag around it may be missing, as models forget it. A value becomes what the
    function's schema says: strings are given on as they come, all others when they are complete."""

    def __init__(self, sink: Sink):
        self._sink = sink
        self._at = _At.TEXT
        self._marks = _search(_At.TEXT)
        self._head = ""
        """Read since the block or the call began, for the case that it is none."""
        self._name: list[str] = []
        self._called = False
        """The block has held a call."""
        self._schema: Mapping[str, Any] = {}
        self._num_parameters = 0
        self._value: _Value | None = None

    def feed(self, text: str) -> None:
        while text:
            if self._at in (_At.BEGUN, _At.FUNCTION_NAME, _At.PARAMETER_NAME):
                text = self._by_character(text)
                continue
            before, mark, text = self._marks.add(text)
            if self._at is _At.TEXT:
                self._sink.text(before)
            elif self._value is not None:
                self._value.add(before)
            if mark is not None:
                self._on_mark(mark)

    def finish(self) -> None:
        """Of a call that was cut short, the arguments stay so."""
        if self._at is _At.TEXT:
            self._sink.text(self._marks.flush())
        elif self._value is not None:
            self._value.add(self._marks.flush())
        elif not self._called:
            self._sink.text(self._head)

    def _go(self, at: _At) -> None:
        self._at, self._marks = at, _search(at)

    def _on_mark(self, mark: str) -> None:
        if self._at is _At.TEXT:
            self._head, self._called, self._name = mark, False, []
            self._go(_At.BEGUN if mark == BEGIN else _At.FUNCTION_NAME)
            return
        if self._value is not None:
            self._value.end()
            self._value = None
        if mark == PARAMETER:
            self._name = []
            self._go(_At.PARAMETER_NAME)
        elif mark == PARAMETER_END:
            self._go(_At.FUNCTION)
        else:
            self._sink.arguments("}" if self._num_parameters else "{}")
            self._head = ""
            self._go(_At.BEGUN if mark == FUNCTION_END else _At.TEXT)

    def _by_character(self, text: str) -> str:
        """Take one character; returns what is left to read."""
        char, rest = text[0], text[1:]
        if self._at is _At.BEGUN:
            return self._begun(char) + rest
        if self._at is _At.PARAMETER_NAME:
            if char == ">":
                self._begin_value("".join(self._name).strip())
            else:
                self._name.append(char)
            return rest
        self._head += char
        if char == ">":
            return self._begin_call("".join(self._name).strip()) + rest
        self._name.append(char)
        if char in "<\n" or len(self._name) > _MAX_NAME:
            return self._give_up() + rest
        return rest

    def _begun(self, char: str) -> str:
        """White space, then the next tag; behind a call the block may end. Returns what has to be read again."""
        self._head += char
        tag = self._head.removeprefix("" if self._called else BEGIN).lstrip()
        wanted = (FUNCTION, END) if self._called else (FUNCTION,)
        if tag == FUNCTION:
            self._name = []
            self._go(_At.FUNCTION_NAME)
        elif self._called and tag == END:
            self._go(_At.TEXT)
        elif not any(one.startswith(tag) for one in wanted):
            return self._give_up()
        return ""

    def _give_up(self) -> str:
        """No call: what began it is text, and what follows that is read again."""
        head, self._head = self._head, ""
        self._go(_At.TEXT)
        if self._called:
            return head
        first = BEGIN if head.startswith(BEGIN) else FUNCTION
        self._sink.text(first)
        return head[len(first) :]

    def _begin_call(self, name: str) -> str:
        if name not in self._sink.names:
            return self._give_up()
        self._sink.call(name)
        self._called, self._num_parameters, self._head = True, 0, ""
        self._schema = self._sink.schemas.get(name) or {}
        self._go(_At.FUNCTION)
        return ""

    def _begin_value(self, name: str) -> None:
        properties = self._schema.get("properties")
        schema = properties.get(name) if isinstance(properties, Mapping) else None
        before = ("{" if not self._num_parameters else ", ") + json.dumps(name, ensure_ascii=False) + ": "
        self._num_parameters += 1
        self._value = _Value(self._sink, before, frozenset(_kinds(schema)))
        self._go(_At.VALUE)


def _search(at: _At) -> MarkSearch:
    if at is _At.TEXT:
        return MarkSearch((BEGIN, FUNCTION))
    if at is _At.VALUE:
        return MarkSearch((PARAMETER_END, PARAMETER, FUNCTION_END))
    return MarkSearch((PARAMETER, FUNCTION_END, END))


class _Value:
    """A parameter's value: text between its tags, without the newline that stands at each."""

    def __init__(self, sink: Sink, before: str, kinds: frozenset[str]):
        self._sink, self._before, self._kinds = sink, before, kinds
        self._streams = kinds <= {"string"}  # of a parameter without a type, too
        self._pieces: list[str] = []
        self._newline = ""
        """Held back: it may be the last character."""
        self._begun = False

    def add(self, text: str) -> None:
        if not text:
            return
        if not self._begun:
            self._begun = True
            text = text.removeprefix("\n")
            if self._streams:
                self._sink.arguments(self._before + '"')
        text = self._newline + text
        self._newline = "\n" if text.endswith("\n") else ""
        text = text.removesuffix("\n")
        if self._streams:
            self._sink.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._pieces.append(text)

    def end(self) -> None:
        if not self._streams:
            self._sink.arguments(self._before + _converted("".join(self._pieces), self._kinds))
        else:
            self._sink.arguments('"' if self._begun else self._before + '""')


def _kinds(schema: Any) -> Iterator[str]:
    """Types that a schema allows, as far as it names them."""
    if not isinstance(schema, Mapping):
        return
    named = schema.get("type")
    yield from (kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str))
    for name in ("anyOf", "oneOf"):
        members = schema.get(name)
        for one in members if isinstance(members, list) else ():
            yield from _kinds(one)
    if named is None and isinstance(schema.get("enum"), list):
        yield from ("string" if isinstance(one, str) else "any" for one in schema["enum"])


def _converted(text: str, kinds: frozenset[str]) -> str:
    """The value as JSON: of one of the types ``kinds`` if it can be read so, else a string."""
    for read in (json.loads, ast.literal_eval):  # models write Python's literals, too
        try:
            value = read(text.strip())
            if any(_fits(value, kind) for kind in kinds - {"string"}):
                return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
    lowered = text.strip().lower()
    if (lowered in ("true", "false") and "boolean" in kinds) or (lowered == "null" and "null" in kinds):
        return lowered
    return json.dumps(text, ensure_ascii=False)


def _fits(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind in ("boolean", "any")
    wanted = _TYPES.get(kind)
    return kind == "any" or (wanted is not None and isinstance(value, wanted))
