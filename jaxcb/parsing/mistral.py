"""The calls of Mistral: ``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``, and since the v11 tokenizers
``[TOOL_CALLS]name[ARGS]{...}``."""

from __future__ import annotations

import enum

from jaxcb.parsing.events import Sink
from jaxcb.parsing.json_call import JsonCall, JsonSpan
from jaxcb.parsing.marks import MarkSearch

BEGIN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_SPACE = " \t\r\n"


class _At(enum.Enum):
    TEXT = enum.auto()
    BEGUN = enum.auto()
    """Behind the marker."""
    LIST = enum.auto()
    """In the list of the older form, between calls."""
    CALL = enum.auto()
    NAME = enum.auto()
    ARGUMENTS = enum.auto()
    """Of the newer form."""


class MistralParser:
    """Once a call has begun it is one; what stands behind the marker and begins none is text again."""

    def __init__(self, sink: Sink):
        self._sink = sink
        self._begin = MarkSearch((BEGIN,))
        self._at = _At.TEXT
        self._head = ""
        """What was read since the marker or the call before, as long as it may be text."""
        self._call = JsonCall(sink)
        self._span = JsonSpan()

    def feed(self, text: str) -> None:
        at = 0
        while at < len(text):
            if self._at is _At.TEXT:
                before, mark, behind = self._begin.add(text[at:])
                at = len(text) - len(behind)
                self._sink.text(before)
                if mark is not None:
                    self._at, self._head = _At.BEGUN, ""
                continue
            if self._at is _At.CALL and (count := self._call.run(text, at)):
                at += count
                continue
            if self._at is _At.ARGUMENTS and (count := self._span.run(text, at)):
                self._sink.arguments(text[at : at + count])
                at += count
                continue
            char, at = text[at], at + 1
            if self._at is _At.CALL:
                self._in_call(char)
            elif self._at is _At.ARGUMENTS:
                self._sink.arguments(char)
                if self._span.take(char):
                    self._at = _At.TEXT
            elif self._at is _At.NAME:
                self._in_name(char)
            else:
                self._between(char)

    def finish(self) -> None:
        if self._at is _At.CALL and not self._call.started:
            self._sink.text(self._head + self._call.raw)
        elif self._at is _At.NAME:
            self._sink.text(self._head)
        self._sink.text(self._begin.flush())

    def _between(self, char: str) -> None:
        self._head += char
        if char == "{":
            self._at, self._call, self._head = _At.CALL, JsonCall(self._sink), self._head[:-1]
            self._in_call(char)
        elif char == "[" and self._at is _At.BEGUN:
            self._at = _At.LIST
        elif char in _SPACE or (char == "," and self._at is _At.LIST):
            return
        elif char == "]" and self._at is _At.LIST:
            self._at = _At.TEXT
        elif self._at is _At.BEGUN:
            self._at, self._head = _At.NAME, self._head[:-1]
            self._in_name(char)
        else:
            self._give_up(self._head)

    def _in_call(self, char: str) -> None:
        call = self._call
        call.feed(char)
        if call.done or call.broken:
            if call.started:
                self._at, self._head = _At.LIST, ""
            else:
                self._give_up(self._head + call.raw)

    def _in_name(self, char: str) -> None:
        self._head += char
        if char == "{":
            name = self._head[:-1].partition(CALL_ID)[0].replace(ARGS, "").strip()
            if name not in self._sink.names:
                self._give_up(self._head)
                return
            self._at, self._span = _At.ARGUMENTS, JsonSpan()
            self._sink.call(name)
            self._sink.arguments(char)
            self._span.take(char)
        elif not any((name + "[").startswith(self._head.strip()[: len(name) + 1]) for name in self._sink.names):
            self._give_up(self._head)

    def _give_up(self, text: str) -> None:
        """It was text, in which another marker may stand."""
        self._at, self._head = _At.TEXT, ""
        self.feed(text)
