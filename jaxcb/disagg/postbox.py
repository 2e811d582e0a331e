"""Postbox: a thread that does what it is handed, in order, so that an engine's thread never waits for another side."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Postbox:
    """``put`` returns at once; ``close`` ends the thread after what is queued. An exception is logged, and what comes
    after it is done all the same; ``on_error`` is told."""

    def __init__(self, name: str, on_error: Callable[[Exception], None] | None = None):
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._on_error = on_error
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, function: Callable[[], object]) -> None:
        self._queue.put(function)

    def close(self) -> None:
        """Harmless when called again, and on the thread itself, where it doesn't wait."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while (function := self._queue.get()) is not None:
            try:
                function()
            except Exception as error:
                if self._on_error is None:
                    logger.exception("%s failed", self._thread.name)
                else:
                    self._on_error(error)
