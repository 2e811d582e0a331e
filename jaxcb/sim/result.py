"""What a simulated run came to: times of each request, and the totals."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

from jaxcb.sim.trace import TraceRequest

if TYPE_CHECKING:
    from jaxcb.sim.replica import Gaps, Replica


@dataclasses.dataclass(slots=True, eq=False)
class RequestRecord:
    """One request. Times are seconds on the virtual clock, which starts with the trace."""

    number: int
    """Its place in the trace."""
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    """What it asks for."""
    refused: bool = False
    """It could never run: the scheduler didn't take it."""
    rejected: bool = False
    """It was turned away at its arrival, since it would have come too late."""
    num_generated: int = 0
    """What it got, counted when it ended."""
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that came out of the prefix cache."""

    @classmethod
    def of(cls, number: int, request: TraceRequest) -> RequestRecord:
        """Of a request that hasn't come yet."""
        return cls(number, request.arrival_s, request.num_prompt_tokens, request.num_output_tokens)

    @property
    def ttft_s(self) -> float | None:
        """Time from arrival to the first token; None before it."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None before the end, or with only one token."""
        if self.finished_s is None or self.first_token_s is None or self.num_generated < 2:
            return None
        return (self.finished_s - self.first_token_s) / (self.num_generated - 1)

    @property
    def latency_s(self) -> float | None:
        """Time from arrival to the last token; None before it."""
        return None if self.finished_s is None else self.finished_s - self.arrival_s

    def met(self, ttft_s: float, tpot_s: float) -> bool:
        """It has ended, and within both limits."""
        ttft, tpot = self.ttft_s, self.tpot_s
        return self.finished_s is not None and ttft is not None and ttft <= ttft_s and (tpot is None or tpot <= tpot_s)


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
    kv_waste: float
    """Part of the held positions that hold no token: page ends, and what is reserved for later."""
    gaps_s: Float[np.ndarray, "N"]
    gap_counts: Int[np.ndarray, "N"]

    @classmethod
    def of(cls, requests: list[RequestRecord], gaps: Gaps, replicas: Sequence[Replica], duration_s: float) -> Result:
        """Of everything that the replicas have done so far."""
        counters = [replica.scheduler.counters for replica in replicas]
        first = [replica.scheduler.counters for replica in replicas if not replica.continues]
        usages = [replica.usage for replica in replicas]
        pools = [replica.scheduler.pool.num_pages for replica in replicas]
        busy_s, num_steps = sum(usage.busy_s for usage in usages), sum(usage.num_steps for usage in usages)
        held = sum(usage.held_token_seconds for usage in usages)
        live = sum(usage.live_token_seconds for usage in usages)
        page_seconds = sum(usage.busy_s * pages for usage, pages in zip(usages, pools, strict=True))
        return cls(
            requests=requests,
            duration_s=duration_s,
            busy_s=busy_s,
            num_steps=num_steps,
            num_step_tokens=sum(usage.num_step_tokens for usage in usages),
            num_output_tokens=sum(counter.generated_tokens for counter in counters),
            num_preemptions=sum(counter.preemptions for counter in counters),
            num_prompt_tokens=sum(counter.prompt_tokens for counter in first),
            num_cached_tokens=sum(counter.prompt_tokens_cached for counter in first),
            mean_running=sum(usage.num_rows for usage in usages) / num_steps if num_steps else 0.0,
            mean_kv_use=sum(usage.page_seconds for usage in usages) / page_seconds if page_seconds else 0.0,
            peak_kv_use=max(usage.peak_pages / pages for usage, pages in zip(usages, pools, strict=True)),
            kv_waste=max(1 - live / held, 0.0) if held else 0.0,
            gaps_s=np.array(gaps.seconds),
            gap_counts=np.array(gaps.counts),
        )

    @property
    def finished(self) -> list[RequestRecord]:
        return [record for record in self.requests if record.finished_s is not None]

    @property
    def num_refused(self) -> int:
        return sum(record.refused for record in self.requests)

    @property
    def num_rejected(self) -> int:
        return sum(record.rejected for record in self.requests)

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.duration_s if self.duration_s else 0.0

    @property
    def requests_per_s(self) -> float:
        return len(self.finished) / self.duration_s if self.duration_s else 0.0

    def goodput(self, *, ttft_s: float, tpot_s: float) -> float:
        """Requests a second that ended within both limits (DistServe, section 1)."""
        met = sum(record.met(ttft_s, tpot_s) for record in self.requests)
        return met / self.duration_s if self.duration_s else 0.0

    @property
    def prefix_hit_rate(self) -> float:
        """Part of the prompt tokens that the prefix cache gave."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def ttft(self) -> Distribution | None:
        """Time from arrival to the first token."""
        return Distribution.of([time for record in self.requests if (time := record.ttft_s) is not None])

    @property
    def tpot(self) -> Distribution | None:
        """Mean time a token after the first, over requests of two tokens or more."""
        return Distribution.of([time for record in self.requests if (time := record.tpot_s) is not None])

    @property
    def itl(self) -> Distribution | None:
        """Every gap between two tokens of a request."""
        return Distribution.of(self.gaps_s, self.gap_counts)

    @property
    def latency(self) -> Distribution | None:
        """Time from arrival to the last token."""
        return Distribution.of([time for record in self.requests if (time := record.latency_s) is not None])

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
            "num_rejected": self.num_rejected,
            "output_tokens_per_s": self.output_tokens_per_s,
            "requests_per_s": self.requests_per_s,
            **own,
            **times,
        }
