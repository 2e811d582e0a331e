"""Member: one of several engines, and what it was given."""

from __future__ import annotations

import dataclasses

from jaxcb.cluster.shared_queue import Entry
from jaxcb.engine import Engine, EngineStats
from jaxcb.request import FinishReason


class Member:
    """Not thread-safe, but for :meth:`stats_by_engine`. ``load``: answers that the engine has to do; ``num_moved``:
    that failed with it and go on elsewhere."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.load = self.num_moved = 0
        self._open: dict[Entry, int] = {}
        """Answers of each request that run or wait here, oldest hand-over first."""

    @property
    def takes_requests(self) -> bool:
        """It runs, and makes steps."""
        engine = self.engine
        return engine.healthy and engine.accepting and not engine.paused and engine.stats().state == "ok"

    def stats_by_engine(self, name: str) -> dict[str, EngineStats]:
        """Of the engine, by the name that it is given, and of those that work for it alone or for all, by their own; an
        answer that goes on elsewhere has not ended here."""
        error, found = FinishReason.ERROR.value, {}
        for own_name, stats in self.engine.stats_by_engine().items():
            if stats.answers:
                finished = stats.finished | {error: stats.finished[error] - self.num_moved}
                found[name] = dataclasses.replace(stats, finished=finished)
            else:
                found[own_name] = stats
        return found

    def has_room(self, entry: Entry) -> bool:
        """It would admit the request now, as far as can be told from outside: every answer finds a slot, and either
        nothing waits there or the free pages hold the prompts of what waits and this one. (A prompt that the prefix
        cache knows needs fewer; then nothing waits for long, and the first rule lets it in.)"""
        if self.load + len(entry.streams) > self.engine.max_choices:
            return False
        stats = self.engine.stats()
        if not stats.num_waiting:
            return True
        free, still_waiting = stats.kv_pages_total - stats.kv_pages_used, stats.num_waiting
        for other, count in reversed(self._open.items()):  # what came last waits
            if still_waiting <= 0:
                break
            free, still_waiting = free - other.num_pages, still_waiting - count
        return entry.num_pages <= free

    def would_preempt(self, entry: Entry) -> bool:
        """Work of a higher ``Request.priority``, which counts for less, runs in the place that the request needs."""
        ahead = [count for other, count in self._open.items() if other.request.priority <= entry.request.priority]
        return sum(ahead) + len(entry.streams) <= self.engine.max_choices and len(ahead) < len(self._open)

    def given(self, entry: Entry) -> None:
        self._open[entry] = len(entry.streams)
        self.load += len(entry.streams)

    def ended(self, entry: Entry) -> None:
        """One answer of a request."""
        self.load -= 1
        self._open[entry] -= 1
        if not self._open[entry]:
            del self._open[entry]

    def taken_back(self, entry: Entry) -> None:
        """It refused the request after all."""
        self.load -= self._open.pop(entry)
