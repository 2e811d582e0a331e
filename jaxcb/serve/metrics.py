"""/metrics: the engine's counters under the names that vLLM's dashboards use, and times measured in this room.

The prefix ``vllm:`` and the label ``model_name`` are vLLM's; what begins with ``jaxcb:`` is our own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxcb.request import RequestOutput

if TYPE_CHECKING:
    from jaxcb.engine import EngineStats, ServingEngine

_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_INTER_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80)
_LABELS = ("model_name", "engine")
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)


class Metrics:
    """One registry a server. Histograms are filled here; the rest is read from the engine at every scrape."""

    def __init__(self, engine: ServingEngine, model_name: str):
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine, model_name))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(name, text, ["model_name"], buckets=buckets, registry=self._registry)
            return family.labels(model_name)

        self.first_token_s = histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token, of finished requests.", _FIRST_TOKEN_S
        )
        self.inter_token_s = histogram(
            "vllm:inter_token_latency_seconds", "Time between two outputs of a request.", _INTER_TOKEN_S
        )
        self.request_s = histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to last token, of finished requests.", _REQUEST_S
        )

    def finished(self, output: RequestOutput) -> None:
        """Record the times of a request that ran to its end."""
        if output.first_token_s is not None:
            self.first_token_s.observe(output.first_token_s - output.arrival_s)
        if output.finished_s is not None:
            self.request_s.observe(output.finished_s - output.arrival_s)

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes. Takes milliseconds: call it off the event loop."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Reads the engines' stats at scrape time, so that gauges are never stale.

    What is of one engine has the label ``engine`` ("0" where there is but one). Requests in the queue before several
    engines, and those that ended there, have ``engine="queue"``: sums over the label are those of the server.
    """

    def __init__(self, engine: ServingEngine, model_name: str):
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        parts = self._engine.stats_by_engine()
        before = self._before(parts)
        waiting = {name: stats.num_waiting for name, stats in parts.items()}
        finished = {name: stats.finished for name, stats in parts.items()}
        if before is not None:
            waiting["queue"], finished["queue"] = before
        used = {name: stats.kv_pages_used / stats.kv_pages_total for name, stats in parts.items()}
        yield self._gauge("vllm:num_requests_running", "Requests in the batch.", _each(parts, "num_running"))
        yield self._gauge("vllm:num_requests_waiting", "Requests in the queue.", waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Part of the KV pages in use by requests, 0 to 1.", used)
        up = {name: stats.state == "ok" for name, stats in parts.items()}
        up |= {f"prefill at {address}": alive for address, alive in self._engine.peers.items()}
        yield self._gauge("jaxcb:engine_up", "1 while the engine makes steps, or has none to make.", up)
        pages = {n: {"used": s.kv_pages_used, "cached": s.kv_pages_cached} for n, s in parts.items()}
        yield self._pages("jaxcb:kv_pages", "KV pages by state.", _each(parts, "kv_pages_total"), pages)
        if any(stats.host_pages_total for stats in parts.values()):
            yield from self._host_memory(parts)
        counters = (
            ("vllm:prompt_tokens", "Prompt tokens of admitted requests.", "prompt_tokens"),
            ("vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache.", "prompt_tokens_cached"),
            ("vllm:generation_tokens", "Tokens generated.", "generation_tokens"),
            ("vllm:num_preemptions", "Times that a request lost its pages.", "preemptions"),
            ("jaxcb:steps", "Forward passes.", "steps"),
            ("jaxcb:compiles_after_start", "Programs compiled while serving; none should be.", "compiles"),
        )
        for name, text, field in counters:
            yield self._counter(name, text, _each(parts, field))
        if self._engine.config.enable_prefix_caching:
            asked, found = _each(parts, "prompt_tokens"), _each(parts, "prompt_tokens_cached")
            yield self._counter("vllm:prefix_cache_queries", "Tokens looked up in the cache.", asked)
            yield self._counter("vllm:prefix_cache_hits", "Tokens found in the cache.", found)
        yield self._ends(finished)

    def _before(self, parts: Mapping[str, EngineStats]) -> tuple[int, dict[str, int]] | None:
        """Requests that wait before the engines, and ends there by reason; None where nothing stands before them."""
        if len(parts) == 1:
            return None
        from jaxcb.engine import EngineStats  # jax is imported by whoever made the engines

        total, inside = self._engine.stats(), EngineStats.total(list(parts.values()))
        ends = {reason: max(count - inside.finished[reason], 0) for reason, count in total.finished.items()}
        return max(total.num_waiting - inside.num_waiting, 0), ends

    def _ends(self, finished: Mapping[str, Mapping[str, int]]) -> Metric:
        family = CounterMetricFamily(
            "vllm:request_success", "Requests that ended, by reason.", labels=[*_LABELS, "finished_reason"]
        )
        for engine, counts in finished.items():
            for reason, count in counts.items():
                family.add_metric([self._model_name, engine, reason], count)
        return family

    def _gauge(self, name: str, text: str, values: Mapping[str, float]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=_LABELS)
        for engine, value in values.items():
            family.add_metric([self._model_name, engine], value)
        return family

    def _counter(self, name: str, text: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(name, text, labels=_LABELS)
        for engine, value in values.items():
            family.add_metric([self._model_name, engine], value)
        return family

    def _host_memory(self, parts: Mapping[str, EngineStats]) -> Iterator[Metric]:
        """Of engines with host memory for KV. The two gauges have the names of vLLM's engines that swapped."""
        part = {name: stats.host_pages_swapped / stats.host_pages_total for name, stats in parts.items()}
        swapped = _each(parts, "num_swapped")
        yield self._gauge("vllm:num_requests_swapped", "Waiting requests whose KV is in host memory.", swapped)
        yield self._gauge("vllm:cpu_cache_usage_perc", "Part of the host's KV pages that they use, 0 to 1.", part)
        pages = {n: {"swapped": s.host_pages_swapped, "cached": s.host_pages_cached} for n, s in parts.items()}
        total = _each(parts, "host_pages_total")
        yield self._pages("jaxcb:host_kv_pages", "KV pages in host memory by state.", total, pages)
        link = _each(parts, "host_page_s")
        yield self._gauge("jaxcb:host_kv_page_seconds", "Time of a page over the host link, one way.", link)
        swaps, back = _each(parts, "swaps"), _each(parts, "host_pages_brought_back")
        yield self._counter("jaxcb:num_swaps", "Preemptions that moved the KV to host memory.", swaps)
        yield self._counter("jaxcb:host_kv_pages_hit", "Cached pages that a hit moved back to the device.", back)

    def _pages(
        self, name: str, text: str, total: Mapping[str, float], states: Mapping[str, Mapping[str, int]]
    ) -> Metric:
        """Pages by state; cached ones belong to no request and are given up when pages run out."""
        family = GaugeMetricFamily(name, text, labels=[*_LABELS, "state"])
        for engine, counts in states.items():
            for state, count in (*counts.items(), ("free", total[engine] - sum(counts.values()))):
                family.add_metric([self._model_name, engine, state], count)
        return family


def _each(parts: Mapping[str, EngineStats], field: str) -> dict[str, float]:
    """A number of every engine."""
    return {name: getattr(stats, field) for name, stats in parts.items()}
