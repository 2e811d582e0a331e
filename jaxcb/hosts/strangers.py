"""Strangers: connections that have not said yet who they are. Each is heard on a thread of its own, so that one who
says nothing keeps nobody waiting."""

from __future__ import annotations

import logging
import queue
import socket
import threading
from typing import Any, NamedTuple

from jaxcb.disagg.fields import Fields
from jaxcb.disagg.wire import MAX_STRANGERS, Channel
from jaxcb.errors import PeerError
from jaxcb.hosts.link import SILENCE_S

logger = logging.getLogger(__name__)


class Comer(NamedTuple):
    """One who has said that he is a host."""

    channel: Channel
    rank: int
    identity: dict[str, Any]


class Strangers:
    """Whoever is not heard out when it closes loses his connection."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unheard: dict[Channel, threading.Thread] = {}
        self._heard: queue.SimpleQueue[Comer] = queue.SimpleQueue()

    def hear(self, connection: socket.socket, where: Any) -> None:
        """Another one; he is turned away where there are too many.

        Raises:
            RuntimeError: there can be no more threads.
        """
        channel = Channel(connection, SILENCE_S)
        thread = threading.Thread(target=self._hear, args=(channel, where), name="jaxcb-host-stranger", daemon=True)
        with self._lock:
            if len(self._unheard) >= MAX_STRANGERS:
                channel.close()
                return
            try:
                thread.start()
            except RuntimeError:  # there are too many
                channel.close()
                raise
            self._unheard[channel] = thread

    def heard(self) -> Comer | None:
        """One of those who have said who they are, if there is one."""
        return None if self._heard.empty() else self._heard.get()

    def close(self) -> None:
        """Nobody else is wanted."""
        with self._lock:
            unheard = dict(self._unheard)
        for channel, thread in unheard.items():
            channel.close()
            thread.join()
        while (comer := self.heard()) is not None:
            comer.channel.close()

    def _hear(self, channel: Channel, where: Any) -> None:
        comer = None
        try:
            message = Fields(channel.receive(from_stranger=True)[0])
            if (kind := message.text("kind")) != "join":
                raise PeerError(f"it said {kind!r} first")
            comer = Comer(channel, message.integer("rank", 0, 2**31), message.part("identity"))
        except PeerError as error:
            logger.warning("somebody at %s is no host of this engine: %s", where, error)
            channel.close()
        finally:
            with self._lock:  # he is one or the other
                del self._unheard[channel]
                if comer is not None:
                    self._heard.put(comer)
