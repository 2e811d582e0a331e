"""A run as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

A process is an engine. Its first row holds the steps; below it is a row for each slot, with every chunk of a prompt and
every stretch of decodes; counters show tokens and sequences a step; a request that waits is a span of its own.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from jaxcb.errors import ConfigError
from jaxcb.scheduler import Row, StepPlan

_US = 1e6
_STEPS = 0
"""Thread of the steps; slot s is thread s + 1."""


@dataclasses.dataclass(slots=True)
class _Stretch:
    """Steps of a request that follow on each other and only decode."""

    request_id: str
    start_s: float
    end_s: float
    num_steps: int


class PerfettoTrace:
    """Collects plans (pass :meth:`add` as ``on_plan``, with the number of the replica), and writes them."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._stretches: dict[tuple[int, int], _Stretch] = {}  # (replica, slot)
        self._seen: set[tuple[int, str]] = set()
        self._named: set[tuple[int, int]] = set()

    def add(self, replica: int, plan: StepPlan, start_s: float, step_s: float) -> None:
        """Note a step."""
        kind = "decode" if plan.decode_only else "mixed"
        counts = {"tokens": plan.num_tokens, "sequences": plan.num_rows, "decodes": plan.num_decodes}
        self._slice(replica, _STEPS, f"{kind} {plan.num_tokens}", start_s, step_s, {"step": plan.step, **counts})
        for name in ("tokens", "sequences"):
            self._events.append(
                {
                    "ph": "C",
                    "pid": replica,
                    "tid": _STEPS,
                    "name": name,
                    "ts": start_s * _US,
                    "args": {name: counts[name]},
                }
            )
        for row in plan.rows:
            self._row(replica, row, start_s, step_s)

    def write(self, file: Path) -> None:
        """Write everything.

        Raises:
            ConfigError: the file can't be written.
        """
        for key in list(self._stretches):
            self._close(key)
        try:
            file.write_text(json.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"}), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--trace: can't write {file}: {error}", param="trace") from error

    def _row(self, replica: int, row: Row, start_s: float, step_s: float) -> None:
        request = row.sequence.request
        if (replica, request.request_id) not in self._seen:
            self._seen.add((replica, request.request_id))
            self._wait(replica, request.request_id, request.arrival_s, start_s)
        key = (replica, row.slot)
        if row.num_tokens == 1 and row.start >= row.sequence.num_prompt_tokens:
            stretch = self._stretches.get(key)
            # The next step begins where the last ended, up to rounding.
            if stretch and stretch.request_id == request.request_id and start_s <= stretch.end_s + 1e-7:
                stretch.end_s, stretch.num_steps = start_s + step_s, stretch.num_steps + 1
                return
            self._close(key)
            self._stretches[key] = _Stretch(request.request_id, start_s, start_s + step_s, 1)
            return
        self._close(key)
        name = f"{request.request_id} P {row.num_tokens}"
        self._slice(replica, row.slot + 1, name, start_s, step_s, {"start": row.start, "tokens": row.num_tokens})

    def _close(self, key: tuple[int, int]) -> None:
        stretch = self._stretches.pop(key, None)
        if stretch is not None:
            name = f"{stretch.request_id} d {stretch.num_steps}"
            duration_s = stretch.end_s - stretch.start_s
            self._slice(key[0], key[1] + 1, name, stretch.start_s, duration_s, {"tokens": stretch.num_steps})

    def _wait(self, replica: int, request_id: str, arrival_s: float, start_s: float) -> None:
        common = {"cat": "waiting", "name": "waiting", "pid": replica, "id": request_id, "tid": _STEPS}
        self._events.append({"ph": "b", "ts": arrival_s * _US, "args": {"request": request_id}, **common})
        self._events.append({"ph": "e", "ts": start_s * _US, **common})

    def _slice(
        self, replica: int, thread: int, name: str, start_s: float, duration_s: float, args: dict[str, int]
    ) -> None:
        if (replica, thread) not in self._named:
            self._named.add((replica, thread))
            label = "steps" if thread == _STEPS else f"slot {thread - 1}"
            meta = {"ph": "M", "pid": replica, "tid": thread}
            self._events.append({**meta, "name": "thread_name", "args": {"name": label}})
            self._events.append({**meta, "name": "thread_sort_index", "args": {"sort_index": thread}})
            self._events.append({**meta, "name": "process_name", "args": {"name": f"engine {replica}"}})
        self._events.append(
            {
                "ph": "X",
                "pid": replica,
                "tid": thread,
                "name": name,
                "ts": start_s * _US,
                "dur": duration_s * _US,
                "args": args,
            }
        )
