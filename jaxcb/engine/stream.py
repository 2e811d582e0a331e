"""OutputStream: one request's results, for a thread that blocks or for a coroutine that awaits."""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

from jaxcb.request import RequestOutput


class OutputStream:
    """Yields a RequestOutput for each update; the last one has a ``finish_reason``.

    It belongs to an asyncio loop (``async for``) or, without one, to threads (``for``).
    """

    def __init__(self, request_id: str, abort: Callable[[], None], loop: asyncio.AbstractEventLoop | None):
        self.request_id = request_id
        self.loop = loop
        self._abort = abort
        self._finished = False
        self._queue: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
        self._ready: deque[RequestOutput] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def abort(self) -> None:
        """Drop the request: its pages are freed within a step. Harmless after the end."""
        if not self._finished:
            self._abort()

    def __iter__(self) -> Iterator[RequestOutput]:
        return self

    def __next__(self) -> RequestOutput:
        if self.loop is not None:
            raise RuntimeError("this stream belongs to an asyncio loop: use 'async for'")
        if self._finished:
            raise StopIteration
        output = self._queue.get()
        self._finished = output.finished
        return output

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.loop is None:
            raise RuntimeError("this stream belongs to threads: use 'for'")
        if self._finished:
            raise StopAsyncIteration
        while not self._ready:
            self._waiter = self.loop.create_future()
            await self._waiter
        output = self._ready.popleft()
        self._finished = output.finished
        return output

    def _deliver(self, output: RequestOutput) -> None:
        """Called on the loop's own thread."""
        self._ready.append(output)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def deliver(outputs: Iterable[tuple[OutputStream, RequestOutput]]) -> None:
    """Hand outputs over from the engine's side: one wake-up of each asyncio loop, however many streams it has."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[OutputStream, RequestOutput]]] = {}
    for stream, output in outputs:
        if stream.loop is None:
            stream._queue.put(output)
        else:
            by_loop.setdefault(stream.loop, []).append((stream, output))
    for loop, batch in by_loop.items():
        try:
            loop.call_soon_threadsafe(_deliver_all, batch)
        except RuntimeError:  # the loop is closed: nobody is left to read, so the requests are dropped
            for stream, _ in batch:
                stream.abort()


def _deliver_all(batch: list[tuple[OutputStream, RequestOutput]]) -> None:
    for stream, output in batch:
        stream._deliver(output)


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The asyncio loop that this thread is running, if any."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
