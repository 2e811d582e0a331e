"""Link: what two hosts say to each other, and whether the other one still lives."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from jaxcb.disagg.wire import Channel
from jaxcb.errors import PeerError

BEAT_S = 1.0
SILENCE_S = 10.0
"""A side that says nothing for so long is dead; one that is killed is known to be at once."""
PIECE_BYTES = 8 << 20
"""Most of a body that goes out at once: each piece is a sign of life too."""
LAST = "stop"
"""The message after which nothing is to come: that the other side closes then is no loss."""

Message = tuple[dict[str, Any], bytes]


class Link:
    """A channel on which both sides show signs of life."""

    def __init__(self, channel: Channel, name: str):
        self.name, self._channel = name, channel
        self._sending = threading.Lock()
        self._came: queue.SimpleQueue[Message | PeerError] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._reader: threading.Thread | None = None
        self._beats = threading.Thread(target=self._beat, name="jaxcb-host-beat", daemon=True)
        self._beats.start()

    def read_ahead(self, on_lost: Callable[[str], None]) -> None:
        """From now on messages are read as they come, on a thread that calls ``on_lost`` with the reason when there
        will be no more, unless this side has closed; :meth:`receive` raises it then."""
        self._reader = threading.Thread(target=self._read, args=(on_lost,), name="jaxcb-host", daemon=True)
        self._reader.start()

    def send(self, kind: str, body: bytes = b"", **fields: Any) -> None:
        """A message with a body of any size, which goes in as many pieces as it takes.

        Raises:
            PeerError: it can't be sent.
        """
        with self._sending:
            start = 0
            while len(body) - start > PIECE_BYTES:
                self._channel.send({"kind": "piece"}, body[start : start + PIECE_BYTES])
                start += PIECE_BYTES
            self._channel.send({"kind": kind, **fields}, body[start:])

    def receive(self, *kinds: str) -> Message:
        """The next message, which must be of one of these kinds.

        Raises:
            PeerError: it is not, or there will be none; or the other side says why it gives up.
        """
        item = self._next() if self._reader is None else self._came.get()
        if isinstance(item, PeerError):
            raise item
        if item[0].get("kind") not in kinds:
            raise PeerError(f"{self.name} said {item[0].get('kind')!r}, and {' or '.join(kinds)} was to come")
        return item

    def close(self) -> None:
        """Its threads have ended then, but the one that calls."""
        self._closed.set()
        self._channel.close()
        for thread in (self._beats, self._reader):
            if thread is not None and thread is not threading.current_thread():
                thread.join()

    def join(self, timeout_s: float) -> None:
        """Wait until the other side has closed it."""
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join(timeout_s)

    def _next(self) -> Message:
        """The next message that says more than a sign of life, with all pieces of its body."""
        pieces: list[bytes] = []
        while True:
            try:
                message, body = self._channel.receive()
            except PeerError as error:
                raise PeerError(f"{self.name} is lost: {error}") from error
            if message.get("kind") == "failed":
                raise PeerError(f"{self.name} gives up: {message.get('reason')}")
            if message.get("kind") == "piece":
                pieces.append(body)
            elif message.get("kind") != "beat":
                return message, b"".join((*pieces, body))

    def _read(self, on_lost: Callable[[str], None]) -> None:
        try:
            kind = None
            while kind != LAST:
                message = self._next()
                self._came.put(message)
                kind = message[0].get("kind")
        except PeerError as error:
            self._came.put(error)
            if not self._closed.is_set():
                on_lost(str(error))

    def _beat(self) -> None:
        try:
            while not self._closed.wait(BEAT_S):
                self.send("beat")
        except PeerError:
            pass  # whoever receives finds it out too
