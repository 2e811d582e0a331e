"""Every error that jaxcb raises on purpose. Each message says what was wrong, what was expected and what was given."""

from __future__ import annotations


class JaxcbError(Exception):
    """Base of all errors raised by jaxcb on purpose."""


class ConfigError(JaxcbError, ValueError):
    """A field of :class:`jaxcb.config.EngineConfig` (or a command-line flag) has a value that can't work."""

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message)
        self.param = param


class RequestError(JaxcbError, ValueError):
    """A request asks for something impossible. ``param`` names the offending field; the server answers 400."""

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message)
        self.param = param


class ModelError(JaxcbError, ValueError):
    """A model can't be found, read or understood (unknown architecture, missing tensor, wrong shape)."""


class QueueFullError(JaxcbError):
    """The waiting queue is at ``max_waiting``; the server answers 429."""


class EngineStoppedError(JaxcbError):
    """The engine was shut down, or its step loop failed, while the request was in flight; the server answers 503."""


class PeerError(JaxcbError):
    """The other side of a hand-over is gone, is silent, or says what makes no sense."""
