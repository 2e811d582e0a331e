"""From streams of outputs to an HTTP answer: one body, or server-sent events. A client that leaves ends its work."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxcb.request import RequestOutput, best_choices
from jaxcb.serve.beams import requests_of, search_all
from jaxcb.serve.call import Call, Face
from jaxcb.serve.errors import ApiError, ClientLeftError, error_body
from jaxcb.serve.responses import Usage, encode
from jaxcb.serve.service import Meter, Service, log_left

if TYPE_CHECKING:
    from jaxcb.engine import OutputStream

T = TypeVar("T")
_DONE = b"data: [DONE]\n\n"
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the events back
]


async def answer_whole(
    service: Service, face: Face, call: Call, streams: Sequence[OutputStream], receive: Receive
) -> Response:
    """Wait for every sequence and answer with one body.

    Raises:
        ApiError: the engine dropped a sequence.
        ClientLeftError: nobody waits for the answer any more.
    """
    outputs = await _while_connected(_last_outputs(service, streams), receive, call, streams)
    left = iter(outputs)
    chosen = [
        output
        for prompt in call.prompts
        for output in best_choices(list(itertools.islice(left, prompt.sampling.num_choices)), prompt.sampling)
    ]
    return Response(
        encode(face.answer(call, chosen, Usage.of(outputs, echo_only=call.echo_only))), media_type="application/json"
    )


async def answer_beams(service: Service, face: Face, call: Call, receive: Receive) -> Response:
    """Search, and answer with one body.

    Raises:
        RequestError: a search can never run.
        QueueFullError, EngineStoppedError: the engine refused or dropped one.
        ClientLeftError: nobody waits for the answer any more.
    """
    requests = requests_of(service, call)
    outputs = await _while_connected(search_all(service, call, requests), receive, call, ())
    return Response(encode(face.answer(call, outputs, Usage.of(outputs))), media_type="application/json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EventStream:
    """An ASGI response: every output is sent as it comes, each as ``data: <chunk>`` and an empty line.

    The sequences of a call send for themselves, so their chunks interleave. Then follow the usage, if it was asked
    for, and ``[DONE]``. When the engine fails, an event with an error body stands before ``[DONE]``.
    """

    service: Service
    face: Face
    call: Call
    streams: Sequence[OutputStream]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            end = await _while_connected(self._events(send), receive, self.call, self.streams)
        except ClientLeftError:
            return
        await send({"type": "http.response.body", "body": end + _DONE})

    async def _events(self, send: Send) -> bytes:
        """Send the headers and all chunks; return the last event (usage or error) or nothing."""
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        try:
            outputs = await _gather(
                self._send_outputs(index, stream, send) for index, stream in enumerate(self.streams)
            )
        except ApiError as error:
            _abort(self.streams)
            return _event(error_body(error))
        if not self.call.include_usage:
            return b""
        return _event(self.face.usage_chunk(self.call, Usage.of(outputs, echo_only=self.call.echo_only)))

    async def _send_outputs(self, index: int, stream: OutputStream, send: Send) -> RequestOutput:
        meter = Meter(self.service)
        first = True
        async for output in stream:
            meter.saw(output)
            chunks = self.face.chunks(self.call, index, output, first)
            first = False
            if chunks:
                body = b"".join(map(_event, chunks))
                await send({"type": "http.response.body", "body": body, "more_body": True})
        return output


async def _last_outputs(service: Service, streams: Sequence[OutputStream]) -> list[RequestOutput]:
    async def last(stream: OutputStream) -> RequestOutput:
        meter = Meter(service)
        async for output in stream:
            meter.saw(output)
        return output

    return await _gather(last(stream) for stream in streams)


async def _gather(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order. The first ApiError cancels the others and is raised by itself, not as a group."""
    failures: list[BaseException] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except* ApiError as errors:
        failures = list(errors.exceptions)
    if failures:
        raise failures[0]  # not in the clause above: early releases of Python 3.11 make a group of what it raises
    return [task.result() for task in tasks]


async def _while_connected(
    work: Coroutine[Any, Any, T], receive: Receive, call: Call, streams: Sequence[OutputStream]
) -> T:
    """The result of ``work``. Whatever keeps it from its end (a client that left, a shutdown) aborts ``streams``.

    Raises:
        ClientLeftError: the client went first.
    """
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_client_left(receive))
    try:
        await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            log_left(call)
            raise ClientLeftError
        return task.result()
    except BaseException:
        _abort(streams)
        raise
    finally:
        task.cancel()
        left.cancel()


async def _client_left(receive: Receive) -> None:
    """Returns when the connection is gone; the body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _abort(streams: Sequence[OutputStream]) -> None:
    for stream in streams:
        stream.abort()


def _event(value: msgspec.Struct) -> bytes:
    return b"data: " + encode(value) + b"\n\n"
