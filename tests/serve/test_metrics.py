"""/metrics: parses as Prometheus text and agrees with the engine and with what clients were told."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from jaxcb.engine import EngineStats
from jaxcb.serve.app import make_app

from .fake_engine import PAGES, FakeEngine


def scrape(client: TestClient) -> dict[tuple[str, ...], float]:
    """(sample name, other label values...) -> value; every sample must carry the model's name, and what is of an
    engine that engine's."""
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    samples = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "fake-model"
            assert labels.pop("engine", "0") == "0"
            samples[sample.name, *labels.values()] = sample.value
    return samples


def test_totals_agree_with_the_usage_of_the_answers(client: TestClient) -> None:
    usages = [client.post("/v1/completions", json={"prompt": text}).json()["usage"] for text in ("abc", "de!")]
    samples = scrape(client)
    assert samples["vllm:prompt_tokens_total",] == sum(usage["prompt_tokens"] for usage in usages)
    assert samples["vllm:generation_tokens_total",] == sum(usage["completion_tokens"] for usage in usages)
    assert samples["vllm:prefix_cache_queries_total",] == 6
    assert samples["vllm:prefix_cache_hits_total",] == 2
    assert samples["vllm:request_success_total", "length"] == 1
    assert samples["vllm:request_success_total", "stop"] == 1
    assert samples["vllm:request_success_total", "abort"] == 0
    assert samples["vllm:num_preemptions_total",] == 0


def test_gauges_follow_the_engine(client: TestClient, engine: FakeEngine) -> None:
    engine.live = [object()] * 16  # type: ignore[list-item]  # only counted
    samples = scrape(client)
    assert samples["vllm:num_requests_running",] == 16
    assert samples["vllm:num_requests_waiting",] == 0
    assert samples["vllm:kv_cache_usage_perc",] == 16 / PAGES
    pages = {state: samples["jaxcb:kv_pages", state] for state in ("used", "cached", "free")}
    assert pages == {"used": 16, "cached": 3, "free": PAGES - 19}
    engine.live = []
    assert scrape(client)["vllm:num_requests_running",] == 0


def test_several_engines_have_labels_of_their_own_and_sums_are_those_of_the_server() -> None:
    engine = FakeEngine()
    parts = {str(index): FakeEngine(num_waiting=index).stats() for index in (0, 1, 2)}
    parts["1"].finished["stop"] = 4
    total = EngineStats.total([EngineStats(**stats_of(part)) for part in parts.values()])
    finished = {**total.finished, "stop": 4, "abort": 2}
    engine.stats_by_engine = lambda: {name: EngineStats(**stats_of(part)) for name, part in parts.items()}  # type: ignore[method-assign]  # stands in
    engine.stats = lambda: dataclasses.replace(total, num_waiting=10, finished=finished)  # type: ignore[method-assign]  # stands in
    with TestClient(make_app(engine)) as client:  # type: ignore[arg-type]  # a stand-in
        text = client.get("/metrics").text
    waiting, ends = {}, {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "vllm:num_requests_waiting":
                waiting[sample.labels["engine"]] = sample.value
            if sample.name == "vllm:request_success_total":
                ends[sample.labels["engine"], sample.labels["finished_reason"]] = sample.value
    assert waiting == {"0": 0, "1": 1, "2": 2, "queue": 7}
    assert ends["1", "stop"] == 4 and ends["queue", "stop"] == 0 and ends["queue", "abort"] == 2


def stats_of(fake: SimpleNamespace) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(EngineStats)}
    return {name: value for name, value in vars(fake).items() if name in names}


def test_times_are_counted_once_a_finished_request_and_once_a_gap() -> None:
    engine = FakeEngine(step_s=0.002)
    with TestClient(make_app(engine)) as client:
        for stream in (False, True):
            client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5, "stream": stream})
        samples = scrape(client)
    assert samples["vllm:time_to_first_token_seconds_count",] == 2
    assert samples["vllm:e2e_request_latency_seconds_count",] == 2
    assert samples["vllm:inter_token_latency_seconds_count",] == 8
    assert samples["vllm:e2e_request_latency_seconds_sum",] > samples["vllm:time_to_first_token_seconds_sum",] > 0.002


def test_cache_counters_are_absent_without_a_cache() -> None:
    with TestClient(make_app(FakeEngine(enable_prefix_caching=False))) as client:
        assert ("vllm:prefix_cache_queries_total",) not in scrape(client)


def test_host_memory_is_shown_where_there_is_some(client: TestClient, engine: FakeEngine) -> None:
    assert not any("host" in name or "swap" in name for name, *_ in scrape(client))
    engine.host_memory = {
        "host_pages_total": 40,
        "num_swapped": 2,
        "host_pages_swapped": 10,
        "host_pages_cached": 5,
        "host_pages_brought_back": 7,
        "swaps": 3,
        "host_page_s": 0.25,
    }
    samples = scrape(client)
    assert samples["vllm:num_requests_swapped",] == 2
    assert samples["jaxcb:host_kv_page_seconds",] == 0.25
    assert samples["vllm:cpu_cache_usage_perc",] == 10 / 40
    pages = {state: samples["jaxcb:host_kv_pages", state] for state in ("swapped", "cached", "free")}
    assert pages == {"swapped": 10, "cached": 5, "free": 25}
    assert samples["jaxcb:num_swaps_total",] == 3
    assert samples["jaxcb:host_kv_pages_hit_total",] == 7
