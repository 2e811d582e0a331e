"""KVConnector: how the content of pages gets from a prefill process to a decode process. Control messages go beside it.

At most ``MAX_UNACKNOWLEDGED`` batches are on their way at once, and they are acknowledged in order: a connector needs
no more places than that, and may use them in turn.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax

from jaxcb.disagg.shared_memory import SharedMemory
from jaxcb.disagg.transfer import Transfer
from jaxcb.errors import ConfigError


class KVSender(Protocol):
    """On the prefill side, for one connection."""

    offer: dict[str, Any]
    """What the other side has to know, as JSON."""

    def send(self, rows: jax.Array, num_pages: int) -> dict[str, Any]:
        """Make the first rows of a batch available; the other side is told what is returned."""

    def welcomed(self) -> None:
        """The other side has opened its end."""

    def close(self) -> None:
        """The connection has ended, or came to nothing."""


class KVReceiver(Protocol):
    """On the decode side."""

    def take(self, ticket: dict[str, Any], num_pages: int) -> Any:
        """A batch, ready to be read: an array of the whole batch's shape, on the device or on the host.

        Raises:
            PeerError: the other side is gone, or there is no such batch.
        """

    def close(self) -> None: ...


class KVConnector(Protocol):
    def sender(self, rows: jax.ShapeDtypeStruct) -> KVSender:
        """``rows``: what a batch looks like on this side's devices."""

    def receiver(self, offer: dict[str, Any], rows: jax.ShapeDtypeStruct) -> KVReceiver:
        """Raises ConfigError if the offer can't be taken up from here."""


CONNECTORS = ("shm", "transfer")


def connector_of(name: str, host: str = "127.0.0.1") -> KVConnector:
    """By name: "shm" (shared memory, on one host) or "transfer" (``jax.experimental.transfer``, over the network).

    Arguments:
        host: this machine's address, where "transfer" listens for pulls.
    """
    if name == "shm":
        return SharedMemory()
    if name == "transfer":
        return Transfer(host)
    raise ConfigError(f"--kv-connector must be {' or '.join(CONNECTORS)}, got {name!r}", param="kv_connector")
