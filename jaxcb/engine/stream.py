"""OutputStream: one request's results, for a thread that blocks or for a coroutine that awaits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from types import TracebackType

import numpy as np
from jaxtyping import Float

from jaxcb.logprobs import Logprobs
from jaxcb.request import Request, RequestOutput
from jaxcb.text.worker import TextUpdate


class OutputStream:
    """Yields a RequestOutput for each update; the last one has a ``finish_reason``.

    It belongs to an asyncio loop (``async for``) or, without one, to threads (``for``). Updates that come faster than
    they are read are merged into one, so a stream that nobody reads holds no more than its request's answer. As a
    context manager (``with`` or ``async with``) it drops the request when the block is left before the end; so does
    cancelling the task that awaits it.

    Whoever hands a request from one place to another (a queue, then an engine, then another engine) makes the stream
    himself, passes it on (:meth:`given_to`) and may have its end told first (``at_end``).
    """

    def __init__(
        self, request: Request, abort: Callable[[], None], loop: asyncio.AbstractEventLoop | None, index: int = 0
    ):
        self.request, self.index = request, index
        self.loop = loop
        self._abort = abort
        self.num_delivered = 0
        """Tokens of the answer that came out of an engine, read or not."""
        self.at_end: Callable[[TextUpdate], bool] | None = None
        """Called on an engine's text thread with the update that ends its part, before that is delivered. True: the
        reader isn't to see it, for the answer goes on elsewhere."""
        self._finished = False
        self._token_ids: list[int] = []
        self._text = ""
        self._logprobs: list[Logprobs] = []
        self._prompt_logprobs: Logprobs | None = None
        self._embedding: Float[np.ndarray, "E"] | None = None
        self._pending: TextUpdate | None = None
        self._changed = threading.Condition()  # guards _pending where threads read; a loop's stream lives on one thread
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self._on_end: Callable[[], None] | None = None

    def when_ended(self, call: Callable[[], None]) -> None:
        """Call back once the last output is there to be read; now, if it is. On the thread that brings it, so briefly.
        For streams of threads."""
        with self._changed:
            if not self._ended:
                self._on_end = call
                return
        call()

    def given_to(self, abort: Callable[[], None]) -> None:
        """The request is in other hands: ``abort`` ends it from now on."""
        self._abort = abort

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
        with self._changed:
            while self._pending is None:
                self._changed.wait()
            update, self._pending = self._pending, None
        return self._output(update)

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.loop is None:
            raise RuntimeError("this stream belongs to threads: use 'for'")
        if self._finished:
            raise StopAsyncIteration
        while self._pending is None:
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self.abort()
                raise
        update, self._pending = self._pending, None
        return self._output(update)

    def __enter__(self) -> OutputStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.abort()

    async def __aenter__(self) -> OutputStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.abort()

    def put(self, update: TextUpdate) -> None:
        """The engine's side; for a stream of an asyncio loop, on the loop's own thread."""
        with self._changed:
            if self._pending is None:
                self._pending = update
            else:
                self._pending.extend(update)
            self._ended = update.finish_reason is not None
            on_end = self._on_end if self._ended else None
            self._changed.notify()
        if on_end is not None:
            on_end()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _output(self, update: TextUpdate) -> RequestOutput:
        self._finished = update.finish_reason is not None
        self._token_ids = self._token_ids + update.token_ids  # a new list: the reader may keep, or change, the last one
        self._text += update.text
        self._logprobs = self._logprobs + update.logprobs
        self._prompt_logprobs = self._prompt_logprobs or update.prompt_logprobs
        self._embedding = self._embedding if update.embedding is None else update.embedding
        asked = self.request.sampling.logprobs is not None
        return RequestOutput(
            request_id=self.request.request_id,
            prompt_token_ids=self.request.prompt_token_ids,
            token_ids=self._token_ids,
            text=self._text,
            new_token_ids=update.token_ids,
            new_text=update.text,
            finish_reason=update.finish_reason,
            stop_reason=update.stop_reason,
            error=update.error,
            engine_failed=update.engine_failed,
            num_cached_tokens=update.num_cached_tokens,
            num_preemptions=update.num_preemptions,
            arrival_s=self.request.arrival_s,
            first_token_s=update.first_token_s,
            finished_s=update.finished_s,
            index=self.index,
            logprobs_parts=self._logprobs if asked else None,
            new_logprobs_parts=update.logprobs if asked else None,
            prompt_logprobs=self._prompt_logprobs,
            embedding=self._embedding,
        )


def deliver(updates: Iterable[tuple[OutputStream, TextUpdate]]) -> None:
    """Hand updates over from the engine's side: one wake-up of each asyncio loop, however many streams it has."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[OutputStream, TextUpdate]]] = {}
    for stream, update in updates:
        stream.num_delivered += len(update.token_ids)
        if update.finish_reason is not None and stream.at_end is not None and stream.at_end(update):
            continue
        if stream.loop is None:
            stream.put(update)
        else:
            by_loop.setdefault(stream.loop, []).append((stream, update))
    for loop, batch in by_loop.items():
        try:
            loop.call_soon_threadsafe(_put_all, batch)
        except RuntimeError:  # the loop is closed: nobody is left to read, so the requests are dropped
            for stream, _ in batch:
                stream.abort()


def _put_all(batch: list[tuple[OutputStream, TextUpdate]]) -> None:
    for stream, update in batch:
        stream.put(update)


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The asyncio loop that this thread is running, if any."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def nobody() -> None:
    """Who ends the request of a stream that was given to nobody yet."""
