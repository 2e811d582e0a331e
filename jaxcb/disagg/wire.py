"""Channel: messages over a socket. A message is a JSON object and, behind it, raw bytes; nothing that is received is
ever executed or unpickled.

    magic "JXKV"  length of the JSON: uint32  length of the bytes: uint64  JSON  bytes        (big-endian)
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from typing import Any

from jaxcb.errors import ConfigError, PeerError

_HEAD = struct.Struct("!4sIQ")
_MAGIC = b"JXKV"
MAX_JSON_BYTES = 16 << 20
MAX_BODY_BYTES = 64 << 20
"""Of prompts and log-probabilities; KV goes another way."""
MAX_STRANGER_BYTES = 64 << 10
"""Of a message of somebody who has not been checked yet."""
MAX_STRANGERS = 64
"""Connections of such that are kept; one more is closed."""


class Channel:
    """Any thread may send, one receives.

    Arguments:
        silence_s: the other side counts as dead when nothing comes for so long; None: wait for ever.
    """

    def __init__(self, sock: socket.socket, silence_s: float | None):
        self._sock, self._silence_s, self._lock = sock, silence_s, threading.Lock()
        sock.settimeout(silence_s)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: dict[str, Any], body: bytes = b"") -> None:
        """Raises PeerError where it can't be sent; then the connection is at its end, as part of it may be out. Of a
        message that is too large nothing goes out, and the connection stays."""
        text = json.dumps(message).encode()
        for name, size, most in (("JSON", len(text), MAX_JSON_BYTES), ("a body", len(body), MAX_BODY_BYTES)):
            if size > most:
                raise PeerError(f"a message with {size:,} bytes of {name} is larger than the {most:,} that are taken")
        try:
            with self._lock:
                self._sock.sendall(_HEAD.pack(_MAGIC, len(text), len(body)) + text + body)
        except OSError as error:
            self.close()
            raise PeerError(f"the other side can't be reached any more: {error}") from error

    def receive(self, *, from_stranger: bool = False) -> tuple[dict[str, Any], bytes]:
        """The next message. Raises PeerError if there will be none.

        Arguments:
            from_stranger: who sends has not been checked: it's a short one, without a body, and has to be there as soon
                as a sign of life. (Nothing is sent meanwhile.)
        """
        if not from_stranger:
            return self._receive(MAX_JSON_BYTES, MAX_BODY_BYTES)
        try:
            deadline_s = None if self._silence_s is None else time.monotonic() + self._silence_s
            return self._receive(MAX_STRANGER_BYTES, 0, deadline_s)
        finally:
            with contextlib.suppress(OSError):  # it may be closed
                self._sock.settimeout(self._silence_s)

    def _receive(self, most_json: int, most_body: int, deadline_s: float | None = None) -> tuple[dict[str, Any], bytes]:
        magic, num_json, num_body = _HEAD.unpack(self._read(_HEAD.size, deadline_s))
        if magic != _MAGIC or num_json > most_json or num_body > most_body:
            raise PeerError("what the other side sends is not this protocol: is it a jaxcb engine?")
        try:
            message = json.loads(self._read(num_json, deadline_s))
        except (ValueError, RecursionError) as error:
            raise PeerError(f"the other side sent what is not JSON: {error}") from error
        if not isinstance(message, dict):
            raise PeerError(f"the other side sent {type(message).__name__} where a message is an object")
        return message, self._read(num_body, deadline_s)

    def close(self) -> None:
        """Wake up whoever receives. Harmless when called again."""
        with contextlib.suppress(OSError):  # it may not be connected any more
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _read(self, count: int, deadline_s: float | None) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            try:
                if deadline_s is not None:
                    self._sock.settimeout(max(deadline_s - time.monotonic(), 0.001))
                part = self._sock.recv(min(count - len(parts), 1 << 20))
            except TimeoutError as error:
                what = "nothing" if deadline_s is None else "no message"
                raise PeerError(f"{what} came for {self._silence_s} s") from error
            except OSError as error:
                raise PeerError(f"the connection broke: {error}") from error
            if not part:
                raise PeerError("the other side closed the connection")
            parts += part
        return bytes(parts)


def address_of(text: str, param: str) -> tuple[str, int]:
    """ "HOST:PORT" or "[V6]:PORT" taken apart.

    Raises:
        ConfigError: it is neither.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--{param.replace('_', '-')} must be HOST:PORT, got {text!r}", param=param)
    return host, int(port)
