"""The other end of a connection as a test speaks it: a decode process or a prefill process that may say anything."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxcb.disagg.identity import identity_of
from jaxcb.disagg.messages import pack_request
from jaxcb.disagg.shared_memory import SharedMemory
from jaxcb.disagg.wire import Channel
from jaxcb.engine import Engine
from jaxcb.errors import PeerError
from jaxcb.request import Request, SamplingParams

Script = Callable[["FakePrefill", dict[str, Any]], None]
"""What a fake prefill process says to an order."""


def request_of(name: str, prompt: list[int], **sampling: Any) -> tuple[dict[str, Any], bytes]:
    """As it travels."""
    values = {"max_tokens": 4, "temperature": 0, "ignore_eos": True} | sampling
    return pack_request(Request(request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(**values)))


def raw(text: bytes, body: bytes = b"") -> bytes:
    """A message of which the JSON is given."""
    return struct.pack("!4sIQ", b"JXKV", len(text), len(body)) + text + body


NESTED = raw(b'{"kind":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
"""Deeper than Python's own parser goes."""


class FakeDecode:
    """Joins a server as a decode process does. ``identity`` and its pages are those of ``engine``."""

    def __init__(self, engine: Engine, address: tuple[str, int]):
        self._sock = socket.create_connection(address)
        self.channel = Channel(self._sock, 10.0)
        self.channel.receive()
        self.channel.send({"kind": "join", "identity": identity_of(engine, "shm"), "proof": "", "nonce": ""})
        welcome, _ = self.channel.receive()
        self._session = welcome["session"]
        self.receiver = SharedMemory().receiver(welcome["offer"], engine.handovers.page_rows)
        self.channel.send({"kind": "joined"})

    def tell(self, kind: Any, body: bytes = b"", **fields: Any) -> None:
        self.channel.send({"kind": kind, "session": self._session, **fields}, body)

    def tell_raw(self, message: bytes) -> None:
        self._sock.sendall(message)

    def hear(self, kind: str) -> dict[str, Any]:
        """The next message of this kind."""
        while True:
            message, _ = self.channel.receive()
            if message["kind"] == kind:
                return message

    def is_dropped(self, within_s: float = 20.0) -> bool:
        """The other side ends the connection, which otherwise beats."""
        deadline = time.monotonic() + within_s
        with contextlib.suppress(PeerError):
            while time.monotonic() < deadline:
                self.channel.receive()
            return False
        return True


class FakePrefill:
    """Listens as a prefill process does, for one connection after the other; ``script`` answers each ``begin``."""

    def __init__(self, engine: Engine, script: Script):
        self._engine, self._script = engine, script
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listening.getsockname()[:2]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listening.close()

    def tell(self, kind: Any, body: bytes = b"", **fields: Any) -> None:
        self._channel.send({"kind": kind, **fields}, body)

    def tell_raw(self, message: bytes) -> None:
        self._sock.sendall(message)

    def send_pages(self, count: int) -> dict[str, Any]:
        """A batch of zeros; what ``pages`` says of it."""
        rows = self._engine.handovers.page_rows
        return self._sender.send(np.zeros(rows.shape, rows.dtype), count)  # type: ignore[arg-type]  # it reads any array

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._sock, _ = self._listening.accept()
                self._channel = Channel(self._sock, None)
                with contextlib.suppress(PeerError):
                    self._serve()
                self._channel.close()

    def _serve(self) -> None:
        self._channel.send({"kind": "hello", "identity": identity_of(self._engine, "shm"), "nonce": ""})
        self._channel.receive()
        self._sender = SharedMemory().sender(self._engine.handovers.page_rows)
        self._channel.send({"kind": "welcome", "proof": "", "session": "s", "offer": self._sender.offer})
        self._channel.receive()
        self._sender.welcomed()
        while True:
            message, _ = self._channel.receive()
            if message["kind"] == "begin":
                self._script(self, message)


@contextlib.contextmanager
def fake_prefill(engine: Engine, script: Script) -> Iterator[FakePrefill]:
    """``engine``: whose identity and pages it claims to have."""
    made = FakePrefill(engine, script)
    yield made
    made.close()
