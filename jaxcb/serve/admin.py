"""Routes that change the server: there only with an admin key of their own, and closed to any other."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxcb.cache import cache_dir
from jaxcb.errors import RequestError
from jaxcb.serve.body import read_json_body
from jaxcb.serve.errors import ApiError
from jaxcb.serve.fields import convert, decode_object
from jaxcb.serve.responses import json_response
from jaxcb.serve.service import Service
from jaxcb.serve.status import Status

if TYPE_CHECKING:
    from jaxcb.engine import ServingEngine

LOG_LEVELS = ("debug", "info", "warning", "error")


class LogLevel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    level: str


class Profile(msgspec.Struct, frozen=True):
    directory: str
    """On the server's machine; TensorBoard and Perfetto read it."""


async def pause(request: Request) -> Response:
    """No more steps: what runs keeps its pages, what comes waits."""
    _engine(request).pause()
    return json_response(Status("paused"))


async def resume(request: Request) -> Response:
    _engine(request).resume()
    return json_response(Status("running"))


async def reset_prefix_cache(request: Request) -> Response:
    await asyncio.to_thread(_engine(request).reset_prefix_cache)  # it waits for the end of a step
    return json_response(Status("ok"))


async def start_profile(request: Request) -> Response:
    return json_response(Profile(await asyncio.to_thread(_PROFILER.start)))


async def stop_profile(request: Request) -> Response:
    return json_response(Profile(await asyncio.to_thread(_PROFILER.stop)))


async def log_level(request: Request) -> Response:
    logger = logging.getLogger("jaxcb")
    if request.method == "POST":
        level = convert(decode_object(await read_json_body(request)), LogLevel).level.lower()
        if level not in LOG_LEVELS:
            raise RequestError(f"level must be {', '.join(LOG_LEVELS)}, got {level[:40]!r}", param="level")
        logger.setLevel(level.upper())
    return json_response(LogLevel(logging.getLevelName(logger.getEffectiveLevel()).lower()))


class _Profiler:
    """jax's profiler, of which a process has one. It writes below the cache: no request names a path."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._directory: Path | None = None

    def start(self) -> str:
        """Returns the directory that it writes to.

        Raises:
            ApiError: it runs already (409).
        """
        import jax

        with self._lock:
            if self._directory is not None:
                raise ApiError(409, "The profiler runs already: stop it with POST /stop_profile", code="profiling")
            directory = cache_dir() / "profiles" / time.strftime("%Y%m%d-%H%M%S")
            try:
                jax.profiler.start_trace(str(directory))
            except RuntimeError as error:
                raise ApiError(409, "The profiler runs already, by --profile", code="profiling") from error
            self._directory = directory
            return str(directory)

    def stop(self) -> str:
        """Returns the directory that it has written to.

        Raises:
            ApiError: it does not run (409).
        """
        import jax

        with self._lock:
            if self._directory is None:
                raise ApiError(409, "The profiler does not run: start it with POST /start_profile", code="profiling")
            directory, self._directory = self._directory, None
            jax.profiler.stop_trace()
            return str(directory)


_PROFILER = _Profiler()


def _engine(request: Request) -> ServingEngine:
    service: Service = request.app.state.service
    return service.engine
