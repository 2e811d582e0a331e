"""How long a GPU does nothing, out of a profile that jax took."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bench.common import BenchError


class Idle(NamedTuple):
    """Between the first kernel of a profile and the last."""

    wall_us: float
    busy_us: float
    num_kernels: int
    longest_gap_us: float

    @property
    def share(self) -> float:
        """Of the time, what no kernel ran in."""
        return 1 - self.busy_us / self.wall_us if self.wall_us else 0.0


def read_profile(folder: Path) -> list[dict[str, Any]]:
    """The events of the Chrome trace that ``jax.profiler.trace(folder)`` left.

    Raises:
        BenchError: there is none.
    """
    files = sorted(folder.glob("**/*.trace.json.gz"))
    if not files:
        raise BenchError(f"jax left no *.trace.json.gz in {folder}")
    with gzip.open(files[-1], "rt", encoding="utf-8") as file:
        return json.load(file)["traceEvents"]


def idle(events: Iterable[Mapping[str, Any]]) -> Idle:
    """Of the streams of all GPUs in a profile, taken together. Copies between host and device don't keep a GPU busy.

    Raises:
        BenchError: the profile holds no kernel: it is of a CPU, or CUPTI is missing.
    """
    events = list(events)
    devices = {event["pid"] for event in events if _names(event, "process_name", "/device:GPU")}
    streams = {(event["pid"], event["tid"]) for event in events if _names(event, "thread_name", "Stream")}
    spans = sorted(
        (event["ts"], event["ts"] + event.get("dur", 0.0))
        for event in events
        if event.get("ph") == "X"
        and event["pid"] in devices
        and (event["pid"], event["tid"]) in streams
        and not event["name"].startswith("Memcpy")
    )
    if not spans:
        raise BenchError("the profile holds no kernel of a GPU: it is of a CPU, or CUPTI is missing")
    busy = longest = 0.0
    until = spans[0][0]
    for start, end in spans:
        longest = max(longest, start - until)
        busy += max(end - max(start, until), 0.0)
        until = max(until, end)
    return Idle(until - spans[0][0], busy, len(spans), longest)


def _names(event: Mapping[str, Any], what: str, prefix: str) -> bool:
    return event.get("ph") == "M" and event.get("name") == what and event["args"]["name"].startswith(prefix)
