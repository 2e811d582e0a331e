"""One answer, read with the parsers that its request and its model call for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxcb.parsing.events import CallArguments, CallStart, Event, Parser, Reasoning, Sink, Text
from jaxcb.parsing.reasoning import Markers, ReasoningParser


@dataclasses.dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str
    """JSON, if the model wrote JSON and came to its end."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """A whole answer taken apart."""

    reasoning: str
    text: str
    calls: Sequence[ToolCall]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """How the answers to one request are read.

    Arguments:
        names: functions that can be called.
        schemas: of their arguments, for formats whose values have no types of their own.
        tools: makes the parser of calls; None: the answer holds none.
        parallel: several calls are wanted, not just the first.
        reasoning: markers of the model's reasoning; None: it has none.
        begins_in_reasoning: the prompt has opened it.
    """

    names: frozenset[str] = frozenset()
    schemas: Mapping[str, Mapping[str, Any] | None] = dataclasses.field(default_factory=dict)
    tools: Callable[[Sink], Parser] | None = None
    parallel: bool = True
    reasoning: Markers | None = None
    begins_in_reasoning: bool = False

    def parse(self, text: str) -> Answer:
        """A whole answer."""
        parser = AnswerParser(self)
        return fold([*parser.feed(text), *parser.finish()])


class AnswerParser:
    """Reads one answer piece by piece."""

    def __init__(self, reading: Reading):
        self._sink = Sink(reading.names, parallel=reading.parallel, schemas=reading.schemas)
        self._parser: Parser = _Plain(self._sink) if reading.tools is None else reading.tools(self._sink)
        if reading.reasoning is not None:
            inside = reading.begins_in_reasoning
            self._parser = ReasoningParser(self._sink, self._parser, reading.reasoning, inside=inside)

    def feed(self, text: str) -> list[Event]:
        """The events that are certain now."""
        self._parser.feed(text)
        return self._sink.drain()

    def finish(self) -> list[Event]:
        """The last events; no more text will come."""
        self._parser.finish()
        self._sink.finish()
        return self._sink.drain()


def fold(events: Sequence[Event]) -> Answer:
    """What all events of an answer say together."""
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    text = "".join(event.text for event in events if isinstance(event, Text))
    names = [event.name for event in events if isinstance(event, CallStart)]
    arguments = [""] * len(names)
    for event in events:
        if isinstance(event, CallArguments):
            arguments[event.index] += event.text
    return Answer(reasoning, text, [ToolCall(*call) for call in zip(names, arguments, strict=True)])


class _Plain:
    """An answer that is all text."""

    def __init__(self, sink: Sink):
        self._sink = sink

    def feed(self, text: str) -> None:
        self._sink.text(text)

    def finish(self) -> None: ...
