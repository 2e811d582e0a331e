"""CompileGuard: nothing compiles on the engine's thread once it serves."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Iterator

import jax
from jax import monitoring

from jaxcb.errors import ConfigError

logger = logging.getLogger(__name__)

VARIABLE = "JAXCB_COMPILE_GUARD"
"""Environment variable: "log" (the default), or "raise", which fails the engine, for tests."""
_COMPILED = "/jax/core/compile/backend_compile_duration"
_watched: dict[int, CompileGuard] = {}
"""By thread."""


class CompileGuard:
    """Counts and logs what is compiled while :meth:`watch` is on. Every program of a step is compiled before the start
    and refuses arguments of other shapes, so it can only be something that slipped in beside them; it would hold up
    every request for as long as it takes.

    Raises:
        ConfigError: the environment variable says neither "log" nor "raise".
    """

    def __init__(self) -> None:
        mode = os.environ.get(VARIABLE) or "log"
        if mode not in ("log", "raise"):
            raise ConfigError(f"{VARIABLE} must be log, raise or unset, got {mode!r}")
        self._raises = mode == "raise"
        self.num_compiles = 0

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Watch this thread. jax logs which function was traced anew, from which line, and which argument differed."""
        _listen()
        thread = threading.get_ident()
        _watched[thread] = self
        try:
            with jax.explain_cache_misses(True):
                yield
        finally:
            del _watched[thread]

    def compiled(self, name: str, seconds: float) -> None:
        """Called on the thread that did it."""
        self.num_compiles += 1
        message = f"{name} was compiled while the engine serves ({seconds:.2f} s): please report it"
        if self._raises:
            raise RuntimeError(message)
        logger.error(message)


@functools.cache
def _listen() -> None:
    """Once a process: jax has no way to take a listener back."""
    monitoring.register_event_duration_secs_listener(_on_event)


def _on_event(event: str, duration_secs: float, **facts: str | int) -> None:
    guard = _watched.get(threading.get_ident())
    if guard is not None and event == _COMPILED:
        guard.compiled(str(facts.get("fun_name", "a function")), duration_secs)
