"""PromptService: an engine that computes prompts for others. A PromptDesk is what one of the others talks to."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from jaxcb.disagg.postbox import Postbox
from jaxcb.engine import Engine, OutputStream
from jaxcb.engine.incoming import FirstToken
from jaxcb.errors import JaxcbError, PeerError
from jaxcb.request import FinishReason, Request

logger = logging.getLogger(__name__)


class Receiver(Protocol):
    """A decoding engine, wherever it is. Called on a thread that may wait, one call at a time."""

    def pages(self, request_id: str, first_page: int, num_pages: int, rows: Any) -> None:
        """Bring over the content of pages: a device array as of :class:`jaxcb.engine.outgoing.Sink`."""

    def first_token(self, request_id: str, token: FirstToken) -> None: ...

    def failed(self, request_id: str, reason: str) -> None:
        """Nothing comes any more of this request; the decoding engine does it all."""

    def broken(self, reason: str) -> None:
        """It asked for what makes no sense, or can't be sent to: nothing comes any more of any request. On any thread,
        where it doesn't wait."""


@dataclasses.dataclass
class TransferTotals:
    """Of KV sent, since the start."""

    num_bytes: int = 0
    """Of the pages themselves."""
    seconds: float = 0.0
    """In which they moved, from the moment that they were computed."""


class PromptService:
    """Counts what the engine has to do for all its desks."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.transfers = TransferTotals()
        self._lock = threading.Lock()
        self._backlog_tokens = 0
        self._desk_numbers = itertools.count()

    @property
    def backlog_tokens(self) -> int:
        """Tokens of prompts that were taken on and are not done."""
        return self._backlog_tokens

    @property
    def works(self) -> bool:
        """The engine makes steps, or has none to make."""
        return self.engine.stats().state == "ok"

    def open(self, receiver: Receiver) -> PromptDesk:
        """For one decoding engine.

        Raises:
            ConfigError: the engine was started without ``kv_transfer``.
            EngineStoppedError: it has stopped.
        """
        return PromptDesk(self, receiver, f"{next(self._desk_numbers)}")

    def count(self, num_tokens: int) -> None:
        with self._lock:
            self._backlog_tokens += num_tokens


class PromptDesk:
    """Takes the orders of one decoding engine (it is its :class:`Source`), and sends what comes of them. Threads: one
    hands orders to the engine, one sends."""

    def __init__(self, service: PromptService, receiver: Receiver, name: str):
        self._service, self._receiver, self._name = service, receiver, name
        handovers = service.engine.handovers
        self._outgoing = handovers.send_to(self)
        self._page_bytes = _nbytes(handovers.page_rows) // handovers.page_rows.shape[0]
        self._orders = Postbox(f"jaxcb-prompts-{name}")
        self._parcels = Postbox(f"jaxcb-kv-{name}")
        self._streams: dict[str, OutputStream] = {}
        self._lock = threading.Lock()
        self._closed = False

    # ------------------------------------------------------------------ orders

    def begin(self, request: Request, first_page: int | None, num_updates: int | None = None) -> None:
        """``num_updates``: as for :meth:`jaxcb.engine.handovers.Handovers.submit_prompt`."""
        with self._lock:
            if self._closed:  # nobody would count it off again
                return
            self._service.count(len(request.prompt_token_ids))
            self._orders.put(lambda: self._begin(request, first_page, num_updates))

    def grant(self, request_id: str, first_page: int) -> None:
        # Behind begin(), which takes a while where a grammar has to be compiled.
        self._orders.put(lambda: self._post(lambda: self._outgoing.grant(request_id, first_page)))

    def received(self, request_id: str, num_pages: int) -> None:
        self._post(lambda: self._outgoing.received(request_id, num_pages))

    def drop(self, request_id: str) -> None:
        self._orders.put(lambda: self._drop(request_id))

    def close(self) -> None:
        """The decoding engine is gone, or wants no more: everything of it ends. Harmless when called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            streams = list(self._streams.values())
        for stream in streams:
            stream.abort()
        self._service.engine.handovers.send_no_more(self._outgoing)
        self._orders.close()
        self._parcels.close()

    def _begin(self, request: Request, first_page: int | None, num_updates: int | None) -> None:
        """On the thread of orders."""
        request_id, num_tokens = request.request_id, len(request.prompt_token_ids)
        own = dataclasses.replace(request, request_id=f"{self._name}/{request_id}")
        try:
            stream = self._service.engine.handovers.submit_prompt(
                own, self._outgoing, request_id, first_page, num_updates
            )
        except Exception as error:
            if not isinstance(error, JaxcbError):
                logger.exception("the prompt of %s can't be submitted", request_id)
            self._service.count(-num_tokens)
            reason = str(error)
            self._parcels.put(lambda: self._receiver.failed(request_id, reason))
            return
        with self._lock:
            self._streams[request_id] = stream
            closed = self._closed
        if closed:
            stream.abort()
        stream.when_ended(lambda: self._ended(request_id, stream, num_tokens))

    def _drop(self, request_id: str) -> None:
        with self._lock:
            stream = self._streams.get(request_id)
        if stream is not None:
            stream.abort()
        self._post(lambda: self._outgoing.drop(request_id))

    # ------------------------------------------------------------------ parcels

    def send(self, request_id: str, first_page: int, num_pages: int, rows: Any) -> None:
        """On the engine's thread: see :class:`jaxcb.engine.outgoing.Sink`."""
        self._parcels.put(lambda: self._send(request_id, first_page, num_pages, rows))

    def lost(self, request_id: str) -> None:
        """See :class:`jaxcb.engine.outgoing.Sink`."""
        self._parcels.put(lambda: self._receiver.failed(request_id, "the KV was dropped"))
        self._orders.put(lambda: self._drop(request_id))

    def _send(self, request_id: str, first_page: int, num_pages: int, rows: Any) -> None:
        try:
            rows.block_until_ready()
            started_s = time.perf_counter()
            self._receiver.pages(request_id, first_page, num_pages, rows)
        except Exception as error:  # the batch is never acknowledged, and those after it wait for that
            logger.exception("the KV of %s can't be sent", request_id)
            self._receiver.broken(f"KV can't be sent: {error}")
            return
        self._service.transfers.seconds += time.perf_counter() - started_s
        self._service.transfers.num_bytes += num_pages * self._page_bytes

    def _ended(self, request_id: str, stream: OutputStream, num_tokens: int) -> None:
        """On the text thread, with the last output there to be read."""
        self._service.count(-num_tokens)
        with self._lock:
            self._streams.pop(request_id, None)
        *_, output = stream
        if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) and output.token_ids:
            token = FirstToken(output.token_ids[0], output.num_cached_tokens, output.logprobs)
            self._parcels.put(lambda: self._receiver.first_token(request_id, token))
        else:
            reason = output.error or f"the prompt ended with {output.finish_reason}"
            self._post(lambda: self._outgoing.drop(request_id))
            self._parcels.put(lambda: self._receiver.failed(request_id, reason))

    def _post(self, function: Callable[[], None]) -> None:
        """What the other side may not ask for costs it the connection, and the engine nothing."""

        def guarded() -> None:
            try:
                function()
            except PeerError as error:
                self._receiver.broken(str(error))

        self._service.engine.handovers.post(guarded)


def _nbytes(rows: Any) -> int:
    return rows.size * rows.dtype.itemsize
