"""/metrics: the engine's counters under the names that vLLM's dashboards use, and times measured in this room.

The prefix ``vllm:`` and the label ``model_name`` are vLLM's; what begins with ``jaxcb:`` is our own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxcb.request import RequestOutput

if TYPE_CHECKING:
    from jaxcb.engine import EngineStats, ServingEngine

_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_INTER_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80)
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
    """Reads ``Engine.stats()`` at scrape time, so that gauges are never stale."""

    def __init__(self, engine: ServingEngine, model_name: str):
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        used_part = stats.kv_pages_used / stats.kv_pages_total
        yield self._gauge("vllm:num_requests_running", "Requests in the batch.", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests in the queue.", stats.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Part of the KV pages in use by requests, 0 to 1.", used_part)
        states = {"used": stats.kv_pages_used, "cached": stats.kv_pages_cached}
        yield self._pages("jaxcb:kv_pages", "KV pages by state.", stats.kv_pages_total, states)
        if stats.host_pages_total:
            yield from self._host_memory(stats)
        counters = (
            ("vllm:prompt_tokens", "Prompt tokens of admitted requests.", stats.prompt_tokens),
            ("vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache.", stats.prompt_tokens_cached),
            ("vllm:generation_tokens", "Tokens generated.", stats.generation_tokens),
            ("vllm:num_preemptions", "Times that a request lost its pages.", stats.preemptions),
            ("jaxcb:steps", "Forward passes.", stats.steps),
            ("jaxcb:compiles_after_start", "Programs compiled while serving; none should be.", stats.compiles),
        )
        for name, text, value in counters:
            yield self._counter(name, text, value)
        if self._engine.config.enable_prefix_caching:
            yield self._counter("vllm:prefix_cache_queries", "Tokens looked up in the cache.", stats.prompt_tokens)
            yield self._counter("vllm:prefix_cache_hits", "Tokens found in the cache.", stats.prompt_tokens_cached)
        finished = CounterMetricFamily(
            "vllm:request_success", "Requests that ended, by reason.", labels=["model_name", "finished_reason"]
        )
        for reason, count in stats.finished.items():
            finished.add_metric([self._model_name, reason], count)
        yield finished

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _host_memory(self, stats: EngineStats) -> Iterator[Metric]:
        """Of an engine with host memory for KV. The two gauges have the names of vLLM's engines that swapped."""
        part = stats.host_pages_swapped / stats.host_pages_total
        yield self._gauge(
            "vllm:num_requests_swapped", "Waiting requests whose KV is in host memory.", stats.num_swapped
        )
        yield self._gauge("vllm:cpu_cache_usage_perc", "Part of the host's KV pages that they use, 0 to 1.", part)
        states = {"swapped": stats.host_pages_swapped, "cached": stats.host_pages_cached}
        yield self._pages("jaxcb:host_kv_pages", "KV pages in host memory by state.", stats.host_pages_total, states)
        yield self._counter("jaxcb:num_swaps", "Preemptions that moved the KV to host memory.", stats.swaps)
        back = stats.host_pages_brought_back
        yield self._counter("jaxcb:host_kv_pages_hit", "Cached pages that a hit moved back to the device.", back)

    def _pages(self, name: str, text: str, total: int, states: dict[str, int]) -> Metric:
        """Pages by state; cached ones belong to no request and are given up when pages run out."""
        family = GaugeMetricFamily(name, text, labels=["model_name", "state"])
        for state, count in (*states.items(), ("free", total - sum(states.values()))):
            family.add_metric([self._model_name, state], count)
        return family
