"""Inbox: what callers ask of the engine's thread, and the requests that are open, under one lock."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

from jaxcb.engine.stream import OutputStream
from jaxcb.errors import EngineStoppedError, RequestError
from jaxcb.grammar import Grammar
from jaxcb.request import FinishReason, Request
from jaxcb.scheduler import TokenEvent
from jaxcb.text.worker import TextUpdate

T = TypeVar("T")


Add = Callable[[list[Request], Grammar | None], None]
"""Takes the answers of a request, and the grammar that they are held to."""


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request to be given to ``add``, which may refuse it with RequestError."""

    choices: list[Request]
    grammar: Grammar | None
    add: Add


@dataclasses.dataclass(frozen=True)
class Forks:
    """Requests to be put in the place of running ones, each with the key of the one that it goes on from."""

    children: Sequence[tuple[Request, str | None]]
    parents: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Ending:
    key: str
    reason: FinishReason


@dataclasses.dataclass(frozen=True)
class Call:
    """Something to do between two steps."""

    function: Callable[[], Any]
    result: Future[Any]

    def run(self) -> None:
        """On the engine's thread."""
        try:
            value = self.function()
        except Exception as error:
            self.fail(error)
        else:
            with contextlib.suppress(InvalidStateError):  # the engine has failed meanwhile
                self.result.set_result(value)

    def fail(self, error: Exception) -> None:
        """Unless there is a result."""
        with contextlib.suppress(InvalidStateError):
            self.result.set_exception(error)


@dataclasses.dataclass(frozen=True)
class Post:
    """Something to do between two steps that nobody waits for; what it returns goes to the clients. If it fails, so
    does the engine."""

    function: Callable[[], Sequence[TokenEvent] | None]


Item = Arrival | Forks | Ending | Call | Post


class Inbox:
    """Shared by callers, the engine's thread and the text thread.

    Methods take the lock, except those that say that the caller holds it (``with inbox.lock:``): what must happen
    together, such as the checks of a request and its place in the queue, is done under one.
    """

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.accepting = True
        """False once a shutdown has begun, or the engine failed: requests are refused."""
        self.stopping = False
        self.paused = False
        self.asleep = False
        """The KV pages have no memory."""
        self.error: str | None = None
        """Why the step loop has failed."""
        self.progress_s = 0.0
        """When a step was last done, or work came to an idle engine."""
        self.finished: Counter[FinishReason] = Counter()
        # In the order of the calls, which matters when an id is used again.
        self._items: deque[Item] = deque()
        self._running: Call | None = None
        """The engine's thread is at it."""
        # Inside the engine a request goes by a key of our own: a client may use its id again at once.
        self._keys: dict[str, list[str]] = {}
        self._ids: dict[str, str] = {}
        """The request of a key: not its stream's, which may go by another name where it was made."""
        self._streams: dict[str, OutputStream] = {}
        self._num_opened = 0

    # ------------------------------------------------------------------ for callers

    def check_open(self, request_id: str | None = None) -> None:
        """The caller holds the lock.

        Raises:
            EngineStoppedError: nothing is taken any more.
            RequestError: the id is that of an open request.
        """
        if not self.accepting:
            raise EngineStoppedError(self.error or "the engine is shutting down")
        if request_id in self._keys:
            raise RequestError(f"request id {request_id!r} is in use", param="request_id")

    def open(self, request_id: str, stream: OutputStream) -> str:
        """A key for one answer of a request, which goes to this stream from now on. The caller holds the lock."""
        self._num_opened += 1
        if not self._streams:
            self.progress_s = time.monotonic()
        key = f"{self._num_opened}-{stream.index}-{request_id}"
        stream.given_to(functools.partial(self.end, key, FinishReason.ABORT))
        self._streams[key] = stream
        self._ids[key] = request_id
        self._keys.setdefault(request_id, []).append(key)
        return key

    def put(self, item: Item) -> None:
        with self.lock:
            self._items.append(item)
            self.lock.notify_all()

    def end(self, key: str, reason: FinishReason) -> None:
        """Have one answer ended."""
        self.put(Ending(key, reason))

    def keys_of(self, request_id: str) -> list[str]:
        """Of the open answers of a request."""
        with self.lock:
            return list(self._keys.get(request_id, ()))

    def key_of(self, stream: OutputStream) -> str | None:
        """Of the open answer that goes to this stream; beam search asks for a few. The caller holds the lock."""
        return next((key for key, other in self._streams.items() if other is stream), None)

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the engine's thread, between two steps, and wait for its result.

        Raises:
            EngineStoppedError: the engine has stopped, or stops before it comes to it.
        """
        result: Future[T] = Future()
        with self.lock:
            self.check_open()
            self.put(Call(function, result))
        return result.result()

    def num_arrived(self) -> int:
        """Answers that the scheduler has not seen yet. The caller holds the lock."""
        return sum(len(item.choices) for item in self._items if isinstance(item, Arrival))

    def stalled_s(self, now_s: float) -> float:
        """See :class:`EngineStats`. The caller holds the lock."""
        return max(0.0, now_s - self.progress_s) if self._streams and not self.resting else 0.0

    def pause(self) -> None:
        with self.lock:
            self.paused = True

    def resume(self) -> None:
        with self.lock:
            self.paused, self.progress_s = False, time.monotonic()
            self.lock.notify_all()

    def stop(self, drain_s: float) -> None:
        """Take nothing any more, and have the engine's thread stop when all requests have ended, or the time is up."""
        with self.lock:
            self.accepting = self.paused = False
            self.lock.notify_all()
            self.lock.wait_for(lambda: not self._streams or self.error is not None, timeout=drain_s)
            self.stopping = True
            self.lock.notify_all()

    # ------------------------------------------------------------------ for the engine's thread

    @property
    def resting(self) -> bool:
        """No step is to be made."""
        return self.paused or self.asleep

    def wait(self, has_work: Callable[[], bool]) -> None:
        """Until there is something to take or to do. The caller holds the lock."""
        self.lock.wait_for(lambda: self._items or self.stopping or self.error or (has_work() and not self.resting))

    @property
    def num_items(self) -> int:
        """That came in and were not taken. The caller holds the lock."""
        return len(self._items)

    def take(self) -> Item:
        """What came in first. The caller holds the lock, and lets it go before he runs a :class:`Call` or a
        :class:`Post`: they may wait for devices, and nobody who asks how the engine does is to wait with them."""
        item = self._items.popleft()
        if isinstance(item, Call):
            self._running = item
        return item

    def run(self, call: Call) -> None:
        """One that was taken."""
        call.run()
        with self.lock:
            self._running = None

    def open_keys(self) -> list[str]:
        """Of all open answers."""
        with self.lock:
            return list(self._streams)

    def fail(self, message: str) -> None:
        """Take nothing any more, since the step loop has failed. The first reason is kept."""
        with self.lock:
            self.error, self.accepting = self.error or message, False
            self.lock.notify_all()
        self.refuse_calls(message)

    def refuse_calls(self, message: str) -> None:
        """Those that came too late for the engine's thread, and the one that it may be stuck in."""
        with self.lock:
            calls = [item for item in (self._running, *self._items) if isinstance(item, Call)]
            self._items.clear()
        for call in calls:
            call.fail(EngineStoppedError(message))

    # ------------------------------------------------------------------ for the text thread

    def streams_of(self, updates: Iterable[tuple[str, TextUpdate]]) -> list[tuple[OutputStream, TextUpdate]]:
        """Where updates of answers go, by their keys; those that end are open no longer."""
        found = []
        with self.lock:
            for key, update in updates:
                stream = self._streams[key]
                found.append((stream, update))
                if update.finish_reason is not None:
                    self.finished[update.finish_reason] += 1
                    del self._streams[key]
                    request_id = self._ids.pop(key)
                    keys = self._keys[request_id]
                    keys.remove(key)
                    if not keys:
                        del self._keys[request_id]
            if not self._streams:
                self.lock.notify_all()
        return found
