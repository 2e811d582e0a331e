"""Transfer: pages are pulled over the network by ``jax.experimental.transfer``, from device to device where it can."""

from __future__ import annotations

import functools
import itertools
import secrets
from typing import Any

import jax

from jaxcb.disagg.fields import Fields
from jaxcb.errors import ConfigError, PeerError

_MAX_NUMBER = 2**63 - 1


class Transfer:
    """See :class:`jaxcb.disagg.connector.KVConnector`.

    Arguments:
        host: this machine's address, as the other side reaches it.
    """

    def __init__(self, host: str):
        self._host = host

    def sender(self, rows: jax.ShapeDtypeStruct) -> TransferSender:
        return TransferSender(_server(self._host), rows)

    def receiver(self, offer: dict[str, Any], rows: jax.ShapeDtypeStruct) -> TransferReceiver:
        return TransferReceiver(_server(self._host), offer, rows)


@functools.cache
def _server(host: str) -> Any:
    """One a process and host. Transport addresses are always given: without them a pull that fails takes the serving
    process down (jax 0.10 to 0.12)."""
    try:
        from jax.experimental import transfer

        address = f"[{host}]:0" if ":" in host else f"{host}:0"
        return transfer.start_transfer_server(jax.devices()[0].client, address, [address])
    except Exception as error:
        raise ConfigError(
            f"jax's transfer server doesn't start on {host}: {error}. On one host take --kv-connector shm",
            param="kv_connector",
        ) from error


class TransferSender:
    """Each batch has a number by which it is pulled once. Numbers begin at random, so that none of an earlier
    connection is taken for one of this."""

    def __init__(self, server: Any, rows: jax.ShapeDtypeStruct):
        self._server = server
        self._numbers = itertools.count(secrets.randbits(40) << 20)
        # The first pull of a connection takes up to a second: it is made at once, with a batch that nobody wants.
        warm = jax.device_put(jax.numpy.zeros(rows.shape, rows.dtype), rows.sharding)
        self.offer = {"address": server.address(), **self.send(warm, 0)}

    def send(self, rows: jax.Array, num_pages: int) -> dict[str, Any]:
        number = next(self._numbers)
        self._server.await_pull(number, [rows])
        return {"number": number}

    def welcomed(self) -> None:
        pass

    def close(self) -> None:
        pass  # what was never pulled is held by jax's server until the process ends; there is no way to take it back


class TransferReceiver:
    def __init__(self, server: Any, offer: dict[str, Any], rows: jax.ShapeDtypeStruct):
        self._rows = rows
        try:
            self._connection = server.connect(Fields(offer).text("address"))
            self.take(offer, 0)
        except Exception as error:  # jaxlib has no class of its own for it
            raise ConfigError(f"pages can't be pulled from the other side: {error}", param="kv_connector") from error

    def take(self, ticket: dict[str, Any], num_pages: int) -> jax.Array:
        try:
            [rows] = self._connection.pull(Fields(ticket).integer("number", 0, _MAX_NUMBER), [self._rows])
            return rows.block_until_ready()
        except PeerError:
            raise
        except Exception as error:  # jaxlib has no class of its own for it
            raise PeerError(f"a pull failed: {error}") from error

    def close(self) -> None:
        pass  # jaxlib closes it when nobody refers to it
