"""ProgramStore: an engine's compiled programs on disk. A later start loads them: nothing is traced, nothing compiled.

    programs/1f0c.../forward-decode-8.program    by what the engine is made from, and the program's name
    programs/contents/9a3e...                    by what was lowered: the same files (hard links)

The first key is known before anything is traced: our source, the versions, the machine, the model, every size. Where it
is new, programs are traced, and those that come out as before (most, after a change of settings) still needn't be
compiled: they are found by the second key. jax's own compilation cache works like the second alone, and its hits can't
be stored again (what XLA serialises of a program that it has loaded is not complete), so it is left out here.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import logging
import os
import pickle
import platform
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
from jax import monitoring
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.stages import Compiled, Lowered

import jaxcb
import pallas_kernels
from pallas_kernels import native

logger = logging.getLogger(__name__)

KEEP_S = 30 * 24 * 3600
"""Folders that no engine has opened for so long are removed."""
CONTENTS = "contents"
_CHECKSUM_BYTES = 16
"""Before the pickle of a program."""


class ProgramStore:
    """Programs under ``directory``, of an engine that is made from ``parts`` (their repr counts), compiles them with
    ``options``, which what is lowered doesn't tell, and runs them on ``devices`` (default: the first).

    Whatever can't be read or written is as if it weren't there: the program is compiled, and a warning says why.
    Programs are pickles of machine code: the folder is as trusted as the code itself, and made for its owner only.
    """

    def __init__(
        self,
        directory: Path,
        *parts: object,
        options: Mapping[str, object] | None = None,
        devices: Sequence[jax.Device] | None = None,
    ):
        self._devices = jax.local_devices()[:1] if devices is None else list(devices)
        self._surroundings = _digest(*_surroundings(), options, [device.id for device in self._devices])
        self._folder = directory / _digest(self._surroundings, source_digest(), *parts)
        self._contents = directory / CONTENTS
        _listen()

    def get(self, name: str, lower: Callable[[], Lowered]) -> Compiled:
        """The program of that name: loaded, or else lowered and compiled."""
        file = self._folder / f"{name.replace(' ', '-')}.program"
        if (program := _read(file, self._devices)) is not None:
            return program
        lowered = lower()
        content = self._contents / _digest(self._surroundings, lowered.as_text(), lowered.in_tree, lowered.out_tree)
        if (program := _read(content, self._devices)) is None:
            _seen.cache_hit = False
            program = lowered.compile()
            if _seen.cache_hit:  # of jax's, which the user has turned on
                return program
            self._write(content, program)
        with contextlib.suppress(OSError):  # whatever it was, _write has met it too
            self._link(content, file)
        return program

    def opened(self) -> None:
        """Note that the folder is in use, and remove those that haven't been for long."""
        with contextlib.suppress(OSError):
            if self._folder.is_dir():
                os.utime(self._folder)
            for folder in self._folder.parent.iterdir():
                if folder != self._contents and time.time() - folder.stat().st_mtime > KEEP_S:
                    shutil.rmtree(folder)
            for content in self._contents.iterdir():
                if content.stat().st_nlink == 1 and time.time() - content.stat().st_mtime > KEEP_S:
                    content.unlink()

    def _write(self, content: Path, program: Compiled) -> None:
        scratch = _scratch(content)
        try:
            content.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            stored = pickle.dumps(serialize(program))
            scratch.write_bytes(_checksum(stored) + stored)
            scratch.rename(content)
        except Exception as error:  # jaxlib can't serialise every program; a disk may be full
            with contextlib.suppress(OSError):
                scratch.unlink()
            _warn_once(f"compiled programs can't be kept in {content.parent}: {type(error).__name__}: {error}")

    def _link(self, content: Path, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        scratch = _scratch(file)
        try:
            os.link(content, scratch)
        except OSError:  # a file system without links
            shutil.copy(content, scratch)
        scratch.rename(file)
        with contextlib.suppress(OSError):
            scratch.unlink()  # still there if another process has made the same link meanwhile


def machine() -> str:
    """A name for this kind of CPU: code is made for the instructions that it has."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()} {flags}"


def _read(file: Path, devices: Sequence[jax.Device]) -> Compiled | None:
    """The program in a file, if it is there and whole."""
    if not file.is_file():
        return None
    try:
        content = file.read_bytes()
        stored = content[_CHECKSUM_BYTES:]
        if _checksum(stored) != content[:_CHECKSUM_BYTES]:  # XLA would run what it is given
            raise ValueError("its checksum is wrong")
        payload, arguments, results = pickle.loads(stored)
        return deserialize_and_load(payload, arguments, results, execution_devices=devices)
    except Exception as error:  # of jaxlib, of pickle, of the disk: a file that is cut short can raise anything
        logger.warning("%s can't be loaded (%s: %s); compiling it", file, type(error).__name__, error)
        with contextlib.suppress(OSError):
            file.unlink()
        return None


def _checksum(stored: bytes) -> bytes:
    return hashlib.blake2b(stored, digest_size=_CHECKSUM_BYTES).digest()


def _scratch(file: Path) -> Path:
    """Beside the file, for this process and thread."""
    return file.with_name(f".{file.name}.{os.getpid()}.{threading.get_ident()}")


def _digest(*parts: object) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update((part if isinstance(part, str) else repr(part)).encode() + b"\0")
    return digest.hexdigest()[:32]


def _surroundings() -> Iterator[object]:
    """What the compilation of a lowered program depends on."""
    for package in ("jax", "jaxlib", "numpy", "flax"):
        yield package, importlib.metadata.version(package)
    client = jax.devices()[0].client
    yield machine(), client.platform, client.platform_version
    yield jax.process_index(), [(device.id, device.device_kind) for device in jax.devices()]
    library = native.loaded()
    yield None if library is None else (library.variant, library.path.parent.name)
    # Where caches lie and what is logged doesn't change a program; all else might.
    settings = sorted(jax.config.values.items())
    yield [(name, value) for name, value in settings if "_cache" not in name and not name.startswith("jax_log")]
    yield [(name, os.environ.get(name)) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]


@functools.cache
def source_digest() -> str:
    """A digest of all our Python: of what is traced, and of more than that."""
    digest = hashlib.sha256()
    for package in (jaxcb, pallas_kernels):
        folder = Path(package.__path__[0])
        for file in sorted(folder.rglob("*.py")):
            digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


class _Seen(threading.local):
    """Whether jax's own cache had the program that this thread is compiling."""

    cache_hit = False


_seen = _Seen()


@functools.cache
def _listen() -> None:
    """Once a process: jax has no way to take a listener back."""
    monitoring.register_event_listener(_on_event)


def _on_event(event: str, **_: object) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _seen.cache_hit = True


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)
