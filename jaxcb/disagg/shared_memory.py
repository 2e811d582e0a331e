"""SharedMemory: pages go through memory that both processes map. For two processes of one host.

The file is unlinked as soon as both have it open: whoever dies, and however, the system takes the memory back. What
somebody left who was killed before that goes when the next one makes his.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxcb.disagg.fields import Fields
from jaxcb.engine.outgoing import MAX_UNACKNOWLEDGED
from jaxcb.errors import ConfigError

_DIRECTORY = Path("/dev/shm")
_PREFIX = "jaxcb-kv-"
_STALE_S = 60.0
"""After so long nobody opens a file that was offered to him: an offer is taken up, or refused, within seconds."""


class SharedMemory:
    """See :class:`jaxcb.disagg.connector.KVConnector`."""

    def sender(self, rows: jax.ShapeDtypeStruct) -> SharedMemorySender:
        return SharedMemorySender(rows)

    def receiver(self, offer: dict[str, Any], rows: jax.ShapeDtypeStruct) -> SharedMemoryReceiver:
        return SharedMemoryReceiver(offer, rows)


class SharedMemorySender:
    """As many places as batches may be on their way, used in turn."""

    def __init__(self, rows: jax.ShapeDtypeStruct):
        nbytes = MAX_UNACKNOWLEDGED * rows.size * rows.dtype.itemsize
        directory = _directory()
        _sweep(directory)
        descriptor, self._file = tempfile.mkstemp(prefix=_PREFIX, dir=directory)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)  # a file system that is too small says so now
            self._places = _places(mmap.mmap(descriptor, nbytes), rows)
        except OSError as error:
            self.close()
            raise ConfigError(
                f"{nbytes:,} bytes of shared memory can't be had in {Path(self._file).parent}: {error}. Enlarge it "
                "(docker run --shm-size), or take --kv-connector transfer",
                param="kv_connector",
            ) from error
        finally:
            os.close(descriptor)
        self._num_sent = 0
        self.offer = {"file": self._file}

    def send(self, rows: jax.Array, num_pages: int) -> dict[str, Any]:
        place = self._num_sent % MAX_UNACKNOWLEDGED
        self._num_sent += 1
        self._places[place, :num_pages] = np.asarray(rows)[:num_pages]
        return {"place": place}

    def welcomed(self) -> None:
        self.close()

    def close(self) -> None:
        Path(self._file).unlink(missing_ok=True)


class SharedMemoryReceiver:
    """Copies each batch out at once, since its place is used again."""

    def __init__(self, offer: dict[str, Any], rows: jax.ShapeDtypeStruct):
        file = Path(str(offer.get("file", "")))
        if not file.name.startswith(_PREFIX) or file.parent != _directory():
            raise ConfigError(f"the other side offers {str(file)!r}, no shared memory of jaxcb's", param="kv_connector")
        try:
            with file.open("r+b") as opened:
                self._places = _places(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ), rows)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the other side's shared memory can't be opened ({error}): --kv-connector shm is for two processes of "
                "one host, and of one user; take transfer",
                param="kv_connector",
            ) from error

    def take(self, ticket: dict[str, Any], num_pages: int) -> np.ndarray:
        place = Fields(ticket).integer("place", 0, MAX_UNACKNOWLEDGED - 1)
        batch = np.empty(self._places.shape[1:], self._places.dtype)  # fresh: the device may read it in place
        batch[:num_pages] = self._places[place, :num_pages]
        batch[num_pages:] = 0  # it goes to the trash page, where numbers must be numbers
        return batch

    def close(self) -> None:
        del self._places  # the mapping goes with the last view of it


def _directory() -> Path:
    return _DIRECTORY if _DIRECTORY.is_dir() else Path(tempfile.gettempdir())


def _sweep(directory: Path) -> None:
    """Remove what was left behind."""
    for file in directory.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # it is gone, or another user's
            if time.time() - file.stat().st_mtime > _STALE_S:
                file.unlink()


def _places(memory: mmap.mmap, rows: jax.ShapeDtypeStruct) -> np.ndarray:
    return np.frombuffer(memory, rows.dtype).reshape(MAX_UNACKNOWLEDGED, *rows.shape)
