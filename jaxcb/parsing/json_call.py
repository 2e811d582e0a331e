"""Reads ``{"name": "f", "arguments": {...}}`` character by character, giving its arguments on as they come."""

from __future__ import annotations

import enum
import json
import re
from typing import Any

from jaxcb.parsing.events import Sink

ARGUMENT_KEYS = ("arguments", "parameters")
_SPACE = " \t\r\n"
_INSIDE = re.compile(r'[^"\\]+')
_OUTSIDE = re.compile(r'[^"{}\[\]]+')
"""What changes nothing in a string, and around strings."""


class JsonSpan:
    """Sees where a JSON string, object or array ends."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def run(self, text: str, at: int) -> int:
        """How many characters of ``text`` from ``at`` on :meth:`take` would pass over without a change."""
        if self._escaped:
            return 0
        found = (_INSIDE if self._in_string else _OUTSIDE).match(text, at)
        return found.end() - at if found is not None else 0

    def take(self, char: str) -> bool:
        """Whether ``char``, which follows those before, is the last of the value."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                return self._depth == 0
            return False
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return self._depth <= 0
        return False


class _At(enum.Enum):
    START = enum.auto()
    KEY = enum.auto()
    IN_KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    IN_VALUE = enum.auto()
    IN_SCALAR = enum.auto()
    COMMA = enum.auto()


class JsonCall:
    """One call. The name may stand before or behind the arguments; other keys are passed over.

    Texts that grow are held as lists of characters: adding to a string would copy it each time.
    """

    def __init__(self, sink: Sink):
        self._sink = sink
        self._raw: list[str] = []
        self.started = False
        """The sink has been told of it."""
        self.done = False
        self.broken = False
        """It is not JSON, or calls no function that there is."""
        self._at = _At.START
        self._span = JsonSpan()
        self._key = ""
        self._piece: list[str] = []
        """The key or value under way, but for arguments that are given on."""
        self._waiting: list[str] = []
        """Arguments that came before the name."""
        self._streams = False
        """The value under way is an object of arguments."""
        self._has_arguments = False

    @property
    def raw(self) -> str:
        """All that was read before it started, for the case that it turns out to be no call."""
        return "".join(self._raw)

    def run(self, text: str, at: int) -> int:
        """Take at once what is inside of a value, from ``at`` on; returns how many characters that were."""
        count = self._span.run(text, at) if self._at is _At.IN_VALUE else 0
        if count:
            piece = text[at : at + count]
            if not self.started:
                self._raw.append(piece)
            self._add(piece)
        return count

    def feed(self, char: str) -> None:
        """Take one character; not after ``done`` or ``broken``."""
        if not self.started:
            self._raw.append(char)
        if self._at is _At.IN_KEY:
            self._in_key(char)
        elif self._at is _At.IN_VALUE:
            self._in_value(char)
        elif self._at is _At.IN_SCALAR:
            self._in_scalar(char)
        elif char in _SPACE:
            return
        elif self._at is _At.START:
            self._expect(char == "{", _At.KEY)
        elif self._at is _At.KEY:
            if char == "}":
                self._end()
            else:
                self._piece, self._span = [char], JsonSpan()
                self._span.take(char)
                self._expect(char == '"', _At.IN_KEY)
        elif self._at is _At.COLON:
            self._expect(char == ":", _At.VALUE)
        elif self._at is _At.VALUE:
            self._begin_value(char)
        elif char == "}":
            self._end()
        else:
            self._expect(char == ",", _At.KEY)

    def _expect(self, right: bool, then: _At) -> None:
        self.broken = not right
        self._at = then

    def _in_key(self, char: str) -> None:
        self._piece.append(char)
        if self._span.take(char):
            key = _loads(self._piece)
            self.broken, self._at = not isinstance(key, str), _At.COLON
            self._key = key if isinstance(key, str) else ""

    def _begin_value(self, char: str) -> None:
        self._piece, self._span = [], JsonSpan()
        self.broken = char in ",:}]"
        if char in '"{[':
            self._streams = char == "{" and self._is_arguments
            self._at = _At.IN_VALUE
            self._in_value(char)
        else:
            self._at = _At.IN_SCALAR
            self._piece.append(char)

    def _in_value(self, char: str) -> None:
        ended = self._span.take(char)
        self._add(char)
        if ended:
            self._end_value()

    def _add(self, piece: str) -> None:
        if not self._streams:
            self._piece.append(piece)
        elif self.started:
            self._sink.arguments(piece)
        else:
            self._waiting.append(piece)

    def _in_scalar(self, char: str) -> None:
        if char in ",}" or char in _SPACE:
            self._end_value()
            if char == "}" and not self.broken:
                self._end()
            elif char == ",":
                self._at = _At.KEY
        else:
            self._piece.append(char)

    @property
    def _is_arguments(self) -> bool:
        return self._key in ARGUMENT_KEYS and not self._has_arguments

    def _end_value(self) -> None:
        self._at = _At.COMMA
        if self._key == "name" and not self.started:
            name = _loads(self._piece)
            if not isinstance(name, str) or name not in self._sink.names:
                self.broken = True
                return
            self.started = True
            self._sink.call(name)
            self._sink.arguments("".join(self._waiting))
        elif self._is_arguments:
            if not self._streams:
                self._arguments_of_another_kind()
            self._has_arguments, self._streams = True, False

    def _arguments_of_another_kind(self) -> None:
        """No object: JSON text inside a string (as OpenAI writes it) is taken out of it, nothing is an empty object."""
        value = _loads(self._piece)
        text = "{}" if not value else value if isinstance(value, str) else "".join(self._piece)
        if self.started:
            self._sink.arguments(text)
        else:
            self._waiting.append(text)

    def _end(self) -> None:
        if not self.started:
            self.broken = True
            return
        if not self._has_arguments:
            self._sink.arguments("{}")
        self.done = True


def _loads(text: list[str]) -> Any:
    """The value, or None where it is none."""
    try:
        return json.loads("".join(text))
    except (ValueError, RecursionError):
        return None
