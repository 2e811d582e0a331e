"""What each idea of continuous batching brings: two runs of one trace that differ in one switch.

The multiples are this simulator's own, on traces that show the effect; the papers' are for their systems and machines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxcb.config import EngineConfig
from jaxcb.sim.clusters import Cluster, Machine, StaticPadding, cluster_of
from jaxcb.sim.gpus import GPUS
from jaxcb.sim.models import MODELS
from jaxcb.sim.reference import reference_trace
from jaxcb.sim.replica import Padding, ReplicaSpec
from jaxcb.sim.result import Result
from jaxcb.sim.simulator import Simulation, run
from jaxcb.sim.sizing import limits_on
from jaxcb.sim.step_time import StepTimeModel
from jaxcb.sim.trace import Lognormal, TraceRequest, Workload, arrivals, drawn_trace
from jaxcb.sim.traces import make_trace

_MODEL, _GPU = MODELS["8b"], GPUS["h100"]


class Effect(NamedTuple):
    """One measure without and with the switch."""

    idea: str
    measure: str
    without: float
    with_it: float
    multiple: float
    """How many times better it got."""


def iteration_level() -> Effect:
    """Orca: sequences join and leave at every step, instead of a batch that waits for its longest answer and computes
    padding meanwhile."""
    trace = reference_trace()[:300]
    static = _run(trace, StaticPadding(), batching="static", max_num_seqs=64, max_model_len=2048)
    continuous = _run(trace, max_num_seqs=64, max_model_len=2048)
    return _more("iteration-level over request-level batching", "tok/s", static, continuous, _tokens_per_s)


def paged() -> Effect:
    """PagedAttention: pages as they are needed, instead of room for the longest sequence at admission."""
    trace = make_trace("sharegpt", 400)
    settings: dict[str, Any] = {"max_model_len": 8192, "num_kv_pages": 5120, "max_num_seqs": 256}
    reserved = _run(trace, reservation="full", **settings)
    return _more("paged over reserved KV", "tok/s", reserved, _run(trace, **settings), _tokens_per_s)


def chunked_prefill() -> Effect:
    """Sarathi-Serve: a prompt of 10,000 tokens among 32 decodes, in chunks of 512 instead of in one step."""
    decodes = [TraceRequest(0.0, 100, 400)] * 32
    trace = [*decodes, *(TraceRequest(0.3 + 0.5 * number, 10_000, 10) for number in range(8))]
    whole = _run(trace, max_num_batched_tokens=16_384, enable_chunked_prefill=False, max_model_len=16_384)
    chunks = _run(trace, max_num_batched_tokens=512, max_model_len=16_384)
    return _less("chunked prefill beside decodes", "ITL p99, ms", whole, chunks, _itl_p99_ms)


def disaggregation() -> Effect:
    """DistServe: prefill and decode on cards of their own, where both TTFT and TPOT are tight. Two cards either way."""
    trace = _long_prompts(rate=12.0)
    machine = Machine(model=_MODEL, gpu=_GPU, num_gpus=2)
    together = _finish(cluster_of("vllm-v1", machine, given={"max_model_len": 16_384}), trace)
    apart = _finish(cluster_of("distserve", machine, given={"max_model_len": 16_384}), trace)
    return _more("disaggregation under tight limits", "goodput, req/s", together, apart, _goodput(0.6, 0.009))


def early_rejection() -> Effect:
    """Mooncake: what can't make its TTFT is turned away at its arrival, in an overload that would make all late."""
    trace = _long_prompts(rate=24.0)
    machine = Machine(model=_MODEL, gpu=_GPU, num_gpus=2)
    given = {"max_model_len": 16_384}
    everyone = _finish(cluster_of("mooncake", machine, given=given), trace)
    in_time = _finish(cluster_of("mooncake", machine, given=given, ttft_limit_s=1.0), trace)
    return _more("early rejection in overload", "goodput, req/s", everyone, in_time, _goodput(1.0, 0.05))


def prefix_aware() -> Effect:
    """SGLang: the longest cached prefix first, on a few-shot tree that is larger than the cache."""
    trace = make_trace("few-shot-tree", 400)
    settings: dict[str, Any] = {"num_kv_pages": 1024, "max_num_seqs": 8, "max_model_len": 4096}
    fcfs = _run(trace, policy="fcfs", **settings)
    return _more("prefix-aware order over FCFS", "tok/s", fcfs, _run(trace, policy="prefix", **settings), _tokens_per_s)


def shortest_first() -> Effect:
    """Shortest job first, by a known length, where answers have a heavy tail."""
    heavy = Workload(Lognormal(4.0, 0.5), Lognormal(4.0, 1.8))
    trace = drawn_trace(heavy, 400, rate=12.0, gap_cv=None, random=np.random.default_rng(7))
    trace = [request._replace(num_output_tokens=min(request.num_output_tokens, 7000)) for request in trace]
    settings: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 8192}
    fcfs = _run(trace, policy="fcfs", **settings)
    sjf = _run(trace, policy="sjf", length_predictor="max_tokens", **settings)
    return _less("SJF over FCFS on heavy tails", "mean latency, s", fcfs, sjf, _mean_latency_s)


def watermark() -> Effect:
    """A part of the pages kept from admissions, so that what runs can grow, instead of admitting to the last page: the
    newest are preempted again and again, and everyone waits while their tokens are computed anew."""
    trace = [TraceRequest(0.0, 1000, 1000)] * 80
    settings: dict[str, Any] = {
        "num_kv_pages": 1500,
        "max_model_len": 8192,
        "preemption": "recompute",
        "enable_prefix_caching": False,
    }
    none = _run(trace, admission_watermark=0.0, **settings)
    kept = _run(trace, admission_watermark=0.1, **settings)
    return _less("an admission watermark over none", "ITL p99, ms", none, kept, _itl_p99_ms)


MECHANISMS: tuple[Callable[[], Effect], ...] = (
    iteration_level,
    paged,
    chunked_prefill,
    disaggregation,
    early_rejection,
    prefix_aware,
    shortest_first,
    watermark,
)


def _long_prompts(rate: float) -> list[TraceRequest]:
    """Prompts of some 2,000 tokens and answers of some 150."""
    count = 300
    random = np.random.default_rng(3)
    times = arrivals(count, rate=rate, gap_cv=1.0, random=random)
    prompts = np.minimum(Lognormal(7.6, 0.4).draw(count, random), 8000).tolist()
    outputs = Lognormal(5.0, 0.3).draw(count, random)
    return [TraceRequest(*values) for values in zip(times, prompts, outputs, strict=True)]


def _run(trace: list[TraceRequest], padding: Padding | None = None, **settings: Any) -> Result:
    """On one engine without compiled sizes, so that nothing but the switch differs."""
    spec = ReplicaSpec(
        limits=limits_on(_GPU, _MODEL, EngineConfig(**settings)),
        step_time=StepTimeModel.of(_MODEL, _GPU),
        padding=padding,
    )
    simulation = Simulation([spec], trace)
    run(simulation)
    return simulation.result()


def _finish(cluster: Cluster, trace: list[TraceRequest]) -> Result:
    simulation = cluster.simulation(trace)
    run(simulation)
    return simulation.result()


def _more(idea: str, measure: str, without: Result, with_it: Result, of: Callable[[Result], float]) -> Effect:
    return Effect(idea, measure, of(without), of(with_it), of(with_it) / max(of(without), 1e-9))


def _less(idea: str, measure: str, without: Result, with_it: Result, of: Callable[[Result], float]) -> Effect:
    return Effect(idea, measure, of(without), of(with_it), of(without) / max(of(with_it), 1e-9))


def _tokens_per_s(result: Result) -> float:
    return result.output_tokens_per_s


def _goodput(ttft_s: float, tpot_s: float) -> Callable[[Result], float]:
    return lambda result: result.goodput(ttft_s=ttft_s, tpot_s=tpot_s)


def _itl_p99_ms(result: Result) -> float:
    return result.itl.p99 * 1e3 if result.itl is not None else 0.0


def _mean_latency_s(result: Result) -> float:
    return result.latency.mean if result.latency is not None else 0.0
