"""Leader: the first host's side of the links to the others.

A conversation: the other host sends ``join`` (who it is); when all have, this one sends ``welcome`` (where jax's
coordinator is), and jax starts. Each loads its parts and sends ``loaded`` (what, and how many pages it has room for);
this one answers with ``sizes`` that fit all. Each compiles its programs and sends ``ready``. From then on ``order``
after ``order`` goes out, until ``stop``. Any side that can't go on says so in ``failed``; both send a ``beat`` now and
then.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import jax

from jaxcb.config import EngineConfig
from jaxcb.disagg.fields import Fields
from jaxcb.disagg.identity import difference
from jaxcb.disagg.wire import address_of
from jaxcb.errors import ConfigError, EngineStoppedError, PeerError
from jaxcb.hosts.group import free_port, join
from jaxcb.hosts.identity import WORDS, program_of
from jaxcb.hosts.link import LAST, Link
from jaxcb.hosts.messages import pack
from jaxcb.hosts.strangers import Strangers
from jaxcb.step.orders import Order

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LAST_WORDS_S = 5.0
"""For all hosts together to hear why this one ends."""
_LOOK_S = 0.1
"""Between two looks at what else may have happened while a host is waited for."""


class Leader:
    """Waits for all other hosts when it is made.

    Raises:
        ConfigError: its address can't be listened on, one of the hosts didn't come in time, or one doesn't fit.
    """

    def __init__(self, config: EngineConfig):
        self._config = config
        self._lock = threading.Lock()
        self._links: list[Link] = []
        self._ranks: set[int] = set()
        self._closing = False
        self._lost: str | None = None
        self._on_lost: Callable[[str], None] = logger.error
        self._identity = program_of(config)
        host, port = address_of(config.dist_init_addr or "", "dist_init_addr")
        self._host = host
        with _listening(host, port) as sock, self.saying_why():
            self._gather(sock)

    def start_jax(self) -> None:
        """Over all hosts.

        Raises:
            ConfigError: it can't be, or one of them is lost.
        """
        coordinator = f"[{self._host}]" if ":" in self._host else self._host
        coordinator = f"{coordinator}:{free_port(self._host)}"
        self._send("welcome", coordinator=coordinator)
        self.unless_lost(lambda: join(self._config, coordinator))

    def unless_lost(self, function: Callable[[], T]) -> T:
        """What a function returns in which jax may wait for the other hosts, for minutes.

        Raises:
            ConfigError: one of them is lost meanwhile; nobody waits for the function's thread any more.
        """
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=run, name="jaxcb-host-start", daemon=True).start()
        while not wait([result], _LOOK_S).done:
            if self._lost is not None:
                raise ConfigError(self._lost, param="nnodes")
        return result.result()

    def agree(self, identity: dict[str, str], num_kv_pages: int) -> int:
        """When every host has loaded the same model: how many pages all have room for.

        Raises:
            ConfigError: one has not.
        """
        for link in self._links:
            loaded = self._received(link, "loaded")
            _check(link, identity, loaded.part("identity"))
            num_kv_pages = min(num_kv_pages, loaded.integer("num_kv_pages", 1, 2**31))
        return num_kv_pages

    def set_sizes(self, num_kv_pages: int, sizes: dict[str, str]) -> None:
        """Tell them. Raises ConfigError if one is lost."""
        self._send("sizes", num_kv_pages=num_kv_pages, sizes=sizes)

    def wait_ready(self) -> None:
        """Raises ConfigError if one of the hosts could not make itself ready."""
        for link in self._links:
            self._received(link, "ready")

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Have a function called with the reason, on a thread of its own, once a host is lost."""
        with self._lock:
            self._on_lost, lost = on_lost, self._lost
        if lost is not None:
            on_lost(lost)

    # ------------------------------------------------------------------ Followers

    def tell(self, order: Order) -> None:
        """Raises EngineStoppedError if one of the hosts is lost."""
        if self._lost is not None:
            raise EngineStoppedError(self._lost)
        fields, body = pack(order)
        try:
            for link in self._links:
                link.send("order", body, **fields)
        except PeerError as error:
            raise EngineStoppedError(str(error)) from error

    def close(self) -> None:
        self._end(LAST)
        if self._lost is None:
            jax.distributed.shutdown()

    # ------------------------------------------------------------------ ends

    @contextlib.contextmanager
    def saying_why(self) -> Any:
        """If what is done here fails, the other hosts give up with the same reason."""
        try:
            yield
        except BaseException as error:
            reason = str(error) or type(error).__name__
            with self._lock:
                self._lost = self._lost or reason  # they end, too
            self._end("failed", reason=reason)
            raise

    def _end(self, kind: str, **fields: Any) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
        for link in self._links:
            with contextlib.suppress(PeerError):
                link.send(kind, **fields)
        deadline_s = time.monotonic() + _LAST_WORDS_S
        for link in self._links:
            link.join(max(deadline_s - time.monotonic(), 0.0))
            link.close()

    def _gone(self, reason: str) -> None:
        """On a link's thread."""
        with self._lock:
            if self._closing or self._lost is not None:
                return
            self._lost, on_lost = reason, self._on_lost
        on_lost(reason)
        self._end("failed", reason=reason)

    # ------------------------------------------------------------------ the beginning

    def _gather(self, sock: socket.socket) -> None:
        deadline_s = time.monotonic() + self._config.dist_timeout_s
        strangers = Strangers()
        try:
            while len(self._ranks) < self._config.nnodes - 1:
                if self._lost is not None:
                    raise ConfigError(self._lost, param="nnodes")
                if (left_s := deadline_s - time.monotonic()) <= 0:
                    raise self._too_late()
                sock.settimeout(min(left_s, _LOOK_S))
                try:
                    strangers.hear(*sock.accept())
                except TimeoutError:
                    pass
                except (OSError, RuntimeError) as error:  # of files, or of threads, there are too many
                    logger.warning("a connection can't be accepted: %s", error)
                    time.sleep(_LOOK_S)
                if (comer := strangers.heard()) is not None:
                    self._joined(comer.rank, comer.identity, Link(comer.channel, f"host {comer.rank}"))
        finally:
            strangers.close()

    def _too_late(self) -> ConfigError:
        missing = ", ".join(str(rank) for rank in range(1, self._config.nnodes) if rank not in self._ranks)
        return ConfigError(
            f"of {self._config.nnodes} hosts, --node-rank {missing} did not come to {self._config.dist_init_addr} "
            f"within {self._config.dist_timeout_s:g} s: start the same command there, with that rank",
            param="nnodes",
        )

    def _joined(self, rank: int, identity: dict[str, Any], link: Link) -> None:
        self._links.append(link)  # first, so that it hears of its own refusal
        link.read_ahead(self._gone)
        _check(link, self._identity, identity)
        if rank in self._ranks or not 0 < rank < self._config.nnodes:
            raise ConfigError(
                f"a host came with --node-rank {rank}, which is no other's place: each needs a rank of its own, from 0 "
                f"to {self._config.nnodes - 1}",
                param="node_rank",
            )
        self._ranks.add(rank)

    def _send(self, kind: str, **fields: Any) -> None:
        """To all. Raises ConfigError if one is lost."""
        try:
            for link in self._links:
                link.send(kind, **fields)
        except PeerError as error:
            raise ConfigError(self._lost or str(error), param="nnodes") from error

    def _received(self, link: Link, kind: str) -> Fields:
        try:
            return Fields(link.receive(kind)[0])
        except PeerError as error:
            raise ConfigError(str(error), param="nnodes") from error


def _check(link: Link, ours: dict[str, str], theirs: dict[str, Any]) -> None:
    if (reason := difference(ours, theirs, WORDS)) is not None:
        raise ConfigError(f"host 0 (here) and {link.name} (there): {reason}", param="nnodes")


def _listening(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigError(
            f"can't listen on {host} port {port}: {error.strerror or error}. --dist-init-addr must be an address of "
            "the host with --node-rank 0, and a free port",
            param="dist_init_addr",
        ) from error
