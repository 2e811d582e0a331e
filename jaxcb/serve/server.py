"""The process around the application: the socket, uvicorn, and the way down."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import uvicorn

from jaxcb.errors import ConfigError
from jaxcb.serve.protocol import BoundedHttpProtocol

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from jaxcb.serve.service import Service

logger = logging.getLogger("jaxcb.serve")
_BACKLOG = 2048
_KEEP_ALIVE_S = 60
"""Longer than the idle time after which common clients drop a connection, so they rarely meet one that just closed."""
_LAST_WORDS_S = 5.0
"""For the answers of requests that the drain's end cut short."""


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: clients are refused, not kept waiting, while the model loads.

    Raises:
        ConfigError: the port is taken or the host is not this machine's.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart need not wait for old connections
        sock.bind(address)
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    return sock


def listen(sock: socket.socket) -> str:
    """Let clients in; returns the URL to reach the server at.

    Raises:
        ConfigError: another process took the same port and listened first.
    """
    host, port = sock.getsockname()[:2]
    try:
        sock.listen(_BACKLOG)
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(app: ASGIApp, service: Service, sock: socket.socket, *, drain_timeout_s: float) -> None:
    """Serve until a signal ends it, then return with the engine drained."""
    server = _Server(app, service, drain_timeout_s)
    server.run(sockets=[sock])
    server.join_drain()


class _Server(uvicorn.Server):
    """uvicorn with our signals.

    The first SIGTERM or SIGINT stops accepting; running requests go on for up to ``drain_timeout_s``, then the engine
    drops the rest and their clients get an error. A body that is still being sent is not waited for. The second
    signal ends the process at once. (uvicorn's own handlers would raise the signal again at the end, so that a clean
    stop looked like a crash.)
    """

    def __init__(self, app: ASGIApp, service: Service, drain_timeout_s: float):
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedHttpProtocol,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=math.ceil(drain_timeout_s + _LAST_WORDS_S),
            )
        )
        self._service = service
        self._drain_timeout_s = drain_timeout_s
        self._drain: threading.Thread | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        yield

    def join_drain(self) -> None:
        """Return when the engine is down, if a signal asked for it."""
        if self._drain is not None:
            self._drain.join()

    def _on_signal(self, number: int) -> None:
        if self.should_exit:
            logger.warning("second signal: exiting at once")
            os._exit(128 + number)
        stats = self._service.engine.stats()
        logger.info(
            "%s: draining %d running and %d waiting requests for up to %g s; a second signal exits at once",
            signal.Signals(number).name,
            stats.num_running,
            stats.num_waiting,
            self._drain_timeout_s,
        )
        self.should_exit = True
        self._service.stop_reading()
        # On a thread: the event loop has the last answers to send meanwhile.
        self._drain = threading.Thread(
            target=self._service.engine.shutdown, kwargs={"drain_s": self._drain_timeout_s}, name="jaxcb-drain"
        )
        self._drain.start()


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    reason = error.strerror or str(error)
    return ConfigError(
        f"can't listen on {host} port {port}: {reason}. Choose another with --host and --port", param="port"
    )
