"""What a simulated run came to: times of each request, and the totals."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Float, Int


@dataclasses.dataclass(slots=True, eq=False)
class RequestRecord:
    """One request. Times are seconds on the virtual clock, which starts with the trace."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    """What it asks for."""
    refused: bool = False
    """It could never run: the scheduler didn't take it."""
    num_generated: int = 0
    """What it got, counted when it ended."""
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that came out of the prefix cache."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distribution:
    """Of a time in seconds. A percentile is a value that occurred."""

    mean: float
    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(
        cls, values: list[float] | Float[np.ndarray, "N"], counts: Int[np.ndarray, "N"] | None = None
    ) -> Distribution | None:
        """Of ``values``, each occurring ``counts`` times (default once); None if there are none."""
        if not len(values):
            return None
        p50, p95, p99 = np.percentile(values, (50, 95, 99), weights=counts, method="inverted_cdf").tolist()
        mean = float(np.average(values, weights=counts))
        return cls(mean=mean, p50=p50, p95=p95, p99=p99, max=float(np.max(values)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """A run, or (after an interrupt) its beginning.

    ``gaps_s`` holds the times between the tokens of a request, ``gap_counts`` how often each occurred.
    """

    requests: list[RequestRecord]
    duration_s: float
    """From the first arrival to the last step's end."""
    busy_s: float
    """Time in which the device ran a step."""
    num_steps: int
    num_step_tokens: int
    """Tokens that the steps computed, prompts and recomputation among them."""
    num_output_tokens: int
    num_preemptions: int
    num_prompt_tokens: int
    """Of admitted requests."""
    num_cached_tokens: int
    mean_running: float
    """Sequences in a step."""
    mean_kv_use: float
    """Part of the pages held for requests, averaged over the busy time."""
    peak_kv_use: float
    gaps_s: Float[np.ndarray, "N"]
    gap_counts: Int[np.ndarray, "N"]

    @property
    def finished(self) -> list[RequestRecord]:
        return [record for record in self.requests if record.finished_s is not None]

    @property
    def num_refused(self) -> int:
        return sum(record.refused for record in self.requests)

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.duration_s if self.duration_s else 0.0

    @property
    def requests_per_s(self) -> float:
        return len(self.finished) / self.duration_s if self.duration_s else 0.0

    @property
    def ttft(self) -> Distribution | None:
        """Time from arrival to the first token."""
        return Distribution.of(
            [record.first_token_s - record.arrival_s for record in self.requests if record.first_token_s is not None]
        )

    @property
    def tpot(self) -> Distribution | None:
        """Mean time a token after the first, over requests of two tokens or more."""
        return Distribution.of(
            [
                (record.finished_s - record.first_token_s) / (record.num_generated - 1)
                for record in self.requests
                if record.finished_s is not None and record.first_token_s is not None and record.num_generated > 1
            ]
        )

    @property
    def itl(self) -> Distribution | None:
        """Every gap between two tokens of a request."""
        return Distribution.of(self.gaps_s, self.gap_counts)

    @property
    def latency(self) -> Distribution | None:
        """Time from arrival to the last token."""
        return Distribution.of(
            [record.finished_s - record.arrival_s for record in self.requests if record.finished_s is not None]
        )

    def summary(self) -> dict[str, Any]:
        """Everything but the single requests, ready for JSON."""
        own = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("requests", "gaps_s", "gap_counts")
        }
        times = {
            f"{name}_s": None if (times := getattr(self, name)) is None else dataclasses.asdict(times)
            for name in ("ttft", "tpot", "itl", "latency")
        }
        return {
            "num_requests": len(self.requests),
            "num_finished": len(self.finished),
            "num_refused": self.num_refused,
            "output_tokens_per_s": self.output_tokens_per_s,
            "requests_per_s": self.requests_per_s,
            **own,
            **times,
        }
