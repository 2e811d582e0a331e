"""EngineTrace: what the engine did when, as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

A lane each for planning, launching, the device, committing and text. With running ahead the launch of step k + 1 lies
over the device's step k; a gap in the device's lane is time that the host made it wait.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path

from jaxcb.errors import ConfigError

LANES = ("plan", "launch", "device", "commit", "text")
_US = 1e6


class EngineTrace:
    """Writes to ``file`` as things happen; a viewer also opens the file of a process that was killed.

    Raises:
        ConfigError: the file can't be written.
    """

    def __init__(self, file: Path):
        try:
            self._out = file.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"trace: can't write {file}: {error}", param="trace") from error
        self._lock = threading.Lock()  # the engine's thread and the text thread write
        self._closed = False
        self._out.write("[\n")
        self._write({"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "jaxcb"}}, first=True)
        for number, lane in enumerate(LANES):
            thread = {"ph": "M", "pid": 0, "tid": number}
            self._write({**thread, "name": "thread_name", "args": {"name": lane}})
            self._write({**thread, "name": "thread_sort_index", "args": {"sort_index": number}})

    def span(self, lane: str, name: str, start_s: float, end_s: float, **facts: int) -> None:
        """Something took from ``start_s`` to ``end_s``, on the clock of ``time.perf_counter()``."""
        event = {"ph": "X", "pid": 0, "tid": LANES.index(lane), "name": name, "ts": round(start_s * _US, 3)}
        self._write(event | {"dur": round((end_s - start_s) * _US, 3), "args": facts})

    def close(self) -> None:
        """End the file; what comes later is dropped."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._out.write("\n]\n")
                self._out.close()

    def _write(self, event: dict[str, object], *, first: bool = False) -> None:
        text = json.dumps(event)
        with self._lock:
            if not self._closed:
                self._out.write(text if first else ",\n" + text)
