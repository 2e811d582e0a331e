"""What the engine counts, as one snapshot."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Literal

State = Literal["ok", "stalled", "stopped"]
STALLED_S = 60.0
"""With work and without a step for so long, an engine hangs (vllm#17972: a hang with /health at 200)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Gauges of this moment and totals since the start. ``finished`` counts by finish reason, aborts included."""

    num_running: int
    num_waiting: int
    kv_pages_total: int
    kv_pages_used: int
    """Pages held by live requests."""
    kv_pages_cached: int
    """Free pages whose content is kept for reuse by the prefix cache."""
    prompt_tokens: int
    prompt_tokens_cached: int
    """The part of ``prompt_tokens`` that the prefix cache gave."""
    generation_tokens: int
    preemptions: int
    num_swapped: int = 0
    """The part of ``num_waiting`` whose KV lies in host memory."""
    swaps: int = 0
    """Preemptions that moved the KV to host memory."""
    host_pages_total: int = 0
    host_pages_swapped: int = 0
    """Host pages of sequences that are swapped out."""
    host_pages_cached: int = 0
    """Host pages of prefixes that the device had no room for."""
    host_pages_brought_back: int = 0
    """Of these, how many a hit has moved back to the device so far."""
    host_page_s: float = 0.0
    """Seconds in which a page moves over the host link, one way, as "auto" preemption takes it."""
    steps: int
    compiles: int = 0
    """Programs compiled after the start. Anything but 0 is a fault."""
    finished: dict[str, int]
    uptime_s: float
    stalled_s: float = 0.0
    """Since a step was last done although there is work; 0 while there is none, and in a pause."""
    healthy: bool = True
    """False once the step loop has failed or was shut down."""
    answers: bool = True
    """False where it only computes prompts for engines that do."""

    @property
    def state(self) -> State:
        if not self.healthy:
            return "stopped"
        return "stalled" if self.stalled_s >= STALLED_S else "ok"

    @classmethod
    def total(cls, parts: Sequence[EngineStats]) -> EngineStats:
        """Of several engines as of one: sums, of times the longest, healthy if one of them is."""
        sums = {
            field.name: sum(getattr(part, field.name) for part in parts)
            for field in dataclasses.fields(cls)
            if field.type == "int"
        }
        finished: Counter[str] = Counter()
        for part in parts:
            finished.update(part.finished)
        return cls(
            **sums,
            finished=dict(finished),
            uptime_s=max(part.uptime_s for part in parts),
            host_page_s=max(part.host_page_s for part in parts),
            stalled_s=max(part.stalled_s for part in parts),
            healthy=any(part.healthy for part in parts),
        )
