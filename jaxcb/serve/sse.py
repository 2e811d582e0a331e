"""Server-sent events: how a stream of answers is written down."""

from __future__ import annotations

import abc

import msgspec

from jaxcb.request import RequestOutput
from jaxcb.serve.errors import ApiError, error_body
from jaxcb.serve.responses import Usage, encode

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients pass over it, proxies see that the connection lives."""


def event(value: object, name: str | None = None) -> bytes:
    """One event. OpenAI's older endpoints give events no name."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + encode(value) + b"\n\n"


class Writer(abc.ABC):
    """Writes the stream of one call. Here: what OpenAI's older endpoints do, but for the chunks."""

    keep_alive = KEEP_ALIVE

    def begin(self) -> bytes:
        """What stands before the first output."""
        return b""

    @abc.abstractmethod
    def chunk(self, index: int, output: RequestOutput, first: bool) -> bytes:
        """What an output adds to choice ``index``; ``first``: it is the choice's first."""

    def usage(self, usage: Usage) -> msgspec.Struct | None:
        """The last chunk, if it was asked for."""
        return None

    def end(self, usage: Usage) -> bytes:
        """What follows the last output."""
        last = self.usage(usage)
        return (b"" if last is None else event(last)) + DONE

    def fail(self, error: ApiError) -> bytes:
        """The end of a stream that fails on its way."""
        return event(error_body(error)) + DONE
