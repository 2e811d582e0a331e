"""What parsers say of an answer, and the sink that they say it to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclasses.dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thinks before it answers."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; calls are numbered from 0."""

    index: int
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON text of a call's arguments. The pieces of a call come one after the other."""

    index: int
    text: str


Event = Reasoning | Text | CallStart | CallArguments


class Parser(Protocol):
    """Reads an answer. What it finds goes to the sink that it was made with."""

    def feed(self, text: str) -> None: ...

    def finish(self) -> None:
        """No more text will come: say what was held back."""


class Sink:
    """Collects events; neighbours of one kind become one event.

    White space between text and a call is layout and belongs to neither, so it is held until it is known what follows.
    """

    def __init__(
        self, names: frozenset[str], *, parallel: bool = True, schemas: Mapping[str, Mapping[str, Any] | None] = _NONE
    ):
        self.names = names
        """Functions that can be called. A call of anything else is text."""
        self.schemas = schemas
        """Name of a function -> JSON schema of its arguments, as far as there is one."""
        self._parallel = parallel
        self._events: list[Event] = []
        self._growing: type[Text] | type[Reasoning] | type[CallArguments] | None = None
        """The kind of the event that ``_pieces`` will be: adding to a string would copy it each time."""
        self._pieces: list[str] = []
        self._space = ""
        self._num_calls = 0
        self._trims = False

    def drain(self) -> list[Event]:
        """The events since the last call."""
        self._grow(None)
        events, self._events = self._events, []
        return events

    def trim(self) -> None:
        """Drop the white space with which the text goes on."""
        self._space, self._trims = "", True

    def reasoning(self, text: str) -> None:
        if text:
            self._grow(Reasoning)
            self._pieces.append(text)

    def text(self, text: str) -> None:
        if self._trims:
            text = text.lstrip()
            if not text:
                return
            self._trims = False
        solid = text.rstrip()
        if not solid:
            self._space += text
            return
        self._text(self._space + solid)
        self._space = text[len(solid) :]

    def call(self, name: str) -> None:
        self._space, self._trims = "", True
        self._grow(None)
        self._num_calls += 1
        if self._counts:
            self._events.append(CallStart(self._num_calls - 1, name))

    def arguments(self, text: str) -> None:
        """More of the arguments of the last call."""
        if self._counts and text:
            self._grow(CallArguments)
            self._pieces.append(text)

    def finish(self) -> None:
        if self._space:
            self._text(self._space)
        self._space = ""

    @property
    def _counts(self) -> bool:
        """Whether the last call is given on: where parallel calls are not wanted, the first alone."""
        return self._parallel or self._num_calls == 1

    def _text(self, text: str) -> None:
        self._grow(Text)
        self._pieces.append(text)

    def _grow(self, kind: type[Text] | type[Reasoning] | type[CallArguments] | None) -> None:
        """What comes next belongs to an event of this kind; None: to none."""
        if kind is self._growing:
            return
        text = "".join(self._pieces)
        if self._growing is CallArguments:
            self._events.append(CallArguments(self._num_calls - 1, text))
        elif self._growing is not None:
            self._events.append(Text(text) if self._growing is Text else Reasoning(text))
        self._growing, self._pieces = kind, []
