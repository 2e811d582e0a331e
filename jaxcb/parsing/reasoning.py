"""Separates what a model thinks, ``<think>...</think>``, from what it answers."""

from __future__ import annotations

import dataclasses

from jaxcb.parsing.events import Parser, Sink
from jaxcb.parsing.marks import MarkSearch


@dataclasses.dataclass(frozen=True)
class Markers:
    """``always``: the answer begins inside the reasoning, unless the prompt has closed it already."""

    begin: str
    end: str
    always: bool = False

    def open_after(self, prompt: str) -> bool:
        """Whether an answer to ``prompt`` (its end is enough) begins inside the reasoning."""
        begun, ended = prompt.rfind(self.begin), prompt.rfind(self.end)
        return begun > ended or (self.always and not prompt.rstrip().endswith(self.end))


class ReasoningParser:
    """Reasoning stands at the beginning of an answer or nowhere; the rest goes to ``answer``. The white space around
    either is layout."""

    def __init__(self, sink: Sink, answer: Parser, markers: Markers, *, inside: bool):
        self._sink, self._answer, self._markers = sink, answer, markers
        self._head: str | None = ""
        """What was read while the begin marker could still come."""
        self._inside = inside
        self._end = MarkSearch((markers.end,))
        self._space = ""
        self._empty = True

    def feed(self, text: str) -> None:
        if self._head is not None:
            text = self._read_head(text)
        if not text:
            return
        if not self._inside:
            self._answer.feed(text)
            return
        before, mark, behind = self._end.add(text)
        self._reasoning(before)
        if mark is not None:
            self._inside = False
            self._sink.trim()
            self._answer.feed(behind)

    def finish(self) -> None:
        left = (self._head or "") + self._end.flush()
        self._head = None
        if self._inside:
            self._reasoning(left)
        else:
            self._answer.feed(left)
        self._answer.finish()

    def _read_head(self, text: str) -> str:
        """The text that follows the begin marker, or all of it if there is none; "" while that is open."""
        head = (self._head or "") + text
        solid = head.lstrip()
        if solid.startswith(self._markers.begin):
            self._head, self._inside = None, True
            return solid.removeprefix(self._markers.begin)
        if self._markers.begin.startswith(solid):
            self._head = head
            return ""
        self._head = None
        return head

    def _reasoning(self, text: str) -> None:
        text = self._space + text
        if self._empty:
            text = text.lstrip()
        solid = text.rstrip()
        self._space = text[len(solid) :]
        self._empty = self._empty and not solid
        self._sink.reasoning(solid)
