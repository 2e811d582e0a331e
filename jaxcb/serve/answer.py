"""From streams of outputs to an HTTP answer: one body, or server-sent events. A client that leaves ends its work."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxcb.request import Request, RequestOutput, best_choices
from jaxcb.serve.beams import requests_of, search_all
from jaxcb.serve.call import Call, Face
from jaxcb.serve.errors import ApiError, ClientLeftError
from jaxcb.serve.responses import Usage, encode
from jaxcb.serve.service import Meter, Service, log_left
from jaxcb.serve.sse import Writer

if TYPE_CHECKING:
    from jaxcb.engine import OutputStream

T = TypeVar("T")
KEEP_ALIVE_S = 15.0
"""Longest silence of a stream: proxies cut connections that say nothing for half a minute or more."""
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
    outputs = await _while_connected(_last_outputs(service, streams), receive, call.id, streams)
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
    outputs = await _while_connected(search_all(service, call, requests), receive, call.id, ())
    return Response(encode(face.answer(call, outputs, Usage.of(outputs))), media_type="application/json")


async def read_prompts(
    service: Service, requests: Sequence[Request], field_names: Mapping[str, str], receive: Receive
) -> list[RequestOutput]:
    """The final outputs of requests that are read and not answered.

    Raises:
        RequestError, QueueFullError, EngineStoppedError: the engine refused one of them.
        ApiError: the engine dropped one.
        ClientLeftError: nobody waits for them any more.
    """
    streams = service.submit_all(requests, len(requests), field_names)
    return await _while_connected(_last_outputs(service, streams), receive, requests[0].request_id, streams)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EventStream:
    """An ASGI response: every output is sent as it comes, in the words of the endpoint's writer.

    The sequences of a call send for themselves, so their chunks interleave. When the engine fails, the writer says so
    in the stream, whose status is sent by then. While nothing else is sent, comments keep the connection alive.
    """

    service: Service
    face: Face
    call: Call
    streams: Sequence[OutputStream]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pipe = _Pipe(send)
        writer = self.face.writer(self.call)
        keep_alive = asyncio.ensure_future(pipe.keep_alive(writer.keep_alive))
        try:
            end = await _while_connected(self._events(writer, pipe), receive, self.call.id, self.streams)
        except ClientLeftError:
            return
        finally:
            keep_alive.cancel()
        await send({"type": "http.response.body", "body": end})

    async def _events(self, writer: Writer, pipe: _Pipe) -> bytes:
        """Send the headers and all chunks; return what ends the stream."""
        await pipe.start()
        await pipe.write(writer.begin())
        try:
            outputs = await _gather(
                self._send_outputs(index, stream, writer, pipe) for index, stream in enumerate(self.streams)
            )
        except ApiError as error:
            _abort(self.streams)
            return writer.fail(error)
        return writer.end(Usage.of(outputs, echo_only=self.call.echo_only))

    async def _send_outputs(self, index: int, stream: OutputStream, writer: Writer, pipe: _Pipe) -> RequestOutput:
        meter = Meter(self.service)
        first = True
        async for output in stream:
            meter.saw(output)
            await pipe.write(writer.chunk(index, output, first))
            first = False
        return output


class _Pipe:
    """The body of a stream under way, which knows when it last sent something."""

    def __init__(self, send: Send):
        self._send = send
        self._wrote_s = 0.0

    async def start(self) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        self._wrote_s = time.monotonic()

    async def write(self, body: bytes) -> None:
        if body:
            self._wrote_s = time.monotonic()
            await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def keep_alive(self, comment: bytes) -> None:
        """Send ``comment`` whenever nothing was sent for ``KEEP_ALIVE_S``."""
        while True:
            silent_s = time.monotonic() - self._wrote_s if self._wrote_s else 0.0
            if silent_s >= KEEP_ALIVE_S:
                await self.write(comment)
            await asyncio.sleep(KEEP_ALIVE_S - min(silent_s, KEEP_ALIVE_S) or KEEP_ALIVE_S)


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
    work: Coroutine[Any, Any, T], receive: Receive, name: str, streams: Sequence[OutputStream]
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
            log_left(name)
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
