"""The calls of Llama 3.1 and later: the answer is ``{"name": ..., "parameters": {...}}``, several behind each other."""

from __future__ import annotations

from jaxcb.parsing.events import Sink
from jaxcb.parsing.json_call import JsonCall
from jaxcb.parsing.marks import MarkSearch

TAG = "<|python_tag|>"
_BETWEEN = " \t\r\n;,"


class LlamaParser:
    """An object is a call at the beginning of the answer, behind another call, or behind the tag."""

    def __init__(self, sink: Sink):
        self._sink = sink
        self._tag = MarkSearch((TAG,))
        self._head: str | None = ""
        """What was read where a call may begin; None inside text and inside a call."""
        self._call: JsonCall | None = None
        self._before = ""
        """White space and the like between the call before and this one."""

    def feed(self, text: str) -> None:
        at = 0
        while at < len(text):
            if self._call is not None and (count := self._call.run(text, at)):
                at += count
            elif self._call is not None or self._head is not None:
                char, at = text[at], at + 1
                if self._call is not None:
                    self._in_call(self._call, char)
                else:
                    self._in_head(char)
            else:
                before, mark, behind = self._tag.add(text[at:])
                at = len(text) - len(behind)
                self._sink.text(before)
                if mark is not None:
                    self._head = ""

    def finish(self) -> None:
        if self._call is not None and not self._call.started:
            self._sink.text(self._before + self._call.raw)
        self._sink.text((self._head or "") + self._tag.flush())

    def _in_head(self, char: str) -> None:
        head = (self._head or "") + char
        solid = head.lstrip(_BETWEEN)
        if solid == "{":
            self._head, self._before, self._call = None, head[:-1], JsonCall(self._sink)
            self._call.feed(char)
        elif solid == TAG:
            self._head = ""
        elif TAG.startswith(solid):  # nothing solid yet, too
            self._head = head
        else:
            self._head = None
            self.feed(head)

    def _in_call(self, call: JsonCall, char: str) -> None:
        call.feed(char)
        if call.done or call.broken:
            self._call = None
            if call.started:
                self._head = ""
            else:
                self._sink.text(self._before + call.raw)
