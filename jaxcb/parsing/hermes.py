"""The calls of Hermes, Qwen 2.5 and Qwen 3: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

from __future__ import annotations

import enum

from jaxcb.parsing.events import Sink
from jaxcb.parsing.json_call import JsonCall
from jaxcb.parsing.marks import MarkSearch

BEGIN, END = "<tool_call>", "</tool_call>"


class _At(enum.Enum):
    TEXT = enum.auto()
    BEGUN = enum.auto()
    """Inside a block, before its first call."""
    CALL = enum.auto()
    CALLED = enum.auto()
    """Inside a block, behind a call."""


class HermesParser:
    """A block may hold a list of calls, as SmolLM2 writes it. A block that begins with no call is text as it stands."""

    def __init__(self, sink: Sink):
        self._sink = sink
        self._begin, self._end = MarkSearch((BEGIN,)), MarkSearch((END,))
        self._at = _At.TEXT
        self._head = ""
        """The block before its first call."""
        self._call = JsonCall(sink)

    def feed(self, text: str) -> None:
        at = 0
        while at < len(text):
            if self._at is _At.TEXT:
                before, mark, behind = self._begin.add(text[at:])
                at = len(text) - len(behind)
                self._sink.text(before)
                if mark is not None:
                    self._at, self._head = _At.BEGUN, BEGIN
                continue
            if self._at is _At.CALL and (count := self._call.run(text, at)):
                at += count
                continue
            char, at = text[at], at + 1
            if self._at is _At.BEGUN:
                self._in_head(char)
            elif self._at is _At.CALL:
                self._in_call(char)
            else:
                self._behind_call(char)

    def finish(self) -> None:
        if self._at is _At.BEGUN:
            self._sink.text(self._head)
        elif self._at is _At.CALL and not self._call.started:
            self._sink.text(self._head + self._call.raw)
        elif self._at is _At.TEXT:
            self._sink.text(self._begin.flush())

    def _in_head(self, char: str) -> None:
        if char == "{":
            self._begin_call(char)
        elif char in " \t\r\n[":
            self._head += char
        else:
            self._give_up(self._head + char)

    def _begin_call(self, char: str) -> None:
        self._at, self._call = _At.CALL, JsonCall(self._sink)
        self._call.feed(char)

    def _in_call(self, char: str) -> None:
        call = self._call
        call.feed(char)
        if not call.done and not call.broken:
            return
        if call.started or not self._head:
            self._at, self._head = _At.CALLED, ""
        else:
            self._give_up(self._head + call.raw)

    def _give_up(self, block: str) -> None:
        """The marker was text; what follows it may hold another."""
        self._at = _At.TEXT
        self._sink.text(BEGIN)
        self.feed(block[len(BEGIN) :])

    def _behind_call(self, char: str) -> None:
        """Another call, or the end of the block; anything else is passed over."""
        _, mark, _ = self._end.add(char)
        if mark is not None:
            self._at = _At.TEXT
        elif char == "{":
            self._end.flush()
            self._begin_call(char)
