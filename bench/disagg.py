"""What arriving long prompts do to running answers: whole prompts in a step, chunks beside the answers, and prefill on
an engine of its own (two devices), one after the other in each round, on this machine.

Beside the gaps between tokens: how fast KV moves between the two engines, and how much of that is hidden behind
computation; and, from the simulator with the step times that were measured here, requests within the limits by rate:
two engines that each do everything against one that prefills and one that decodes.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from bench.common import (
    BenchError,
    Result,
    describe,
    machine,
    make_parser,
    markdown_table,
    percentile,
    positive,
    run,
    save,
    show_progress,
)
from bench.inprocess import add_engine_options, engine_config, engine_facts
from bench.pictures import add_plot_option, distribution, picture
from jaxcb.config import EngineConfig
from jaxcb.disagg import Disaggregated
from jaxcb.disagg.start import start_pairs
from jaxcb.engine import Engine, OutputStream, ServingEngine
from jaxcb.request import Request, SamplingParams
from jaxcb.scheduler import SchedulerLimits
from jaxcb.sim.calibrate import fit, read_step_log
from jaxcb.sim.disaggregated import Disaggregated as Pools
from jaxcb.sim.disaggregated import Network
from jaxcb.sim.replica import ReplicaSpec
from jaxcb.sim.simulator import Placement, Simulation
from jaxcb.sim.step_time import StepTimeModel
from jaxcb.sim.traces import make_trace

SYSTEMS = ("whole prompts", "chunked", "disaggregated")
ANSWER_PROMPT = 32
"""Prompt tokens of the answers that run."""
SETTLED = 8
"""Tokens of each answer before the first long prompt comes."""


class Run(NamedTuple):
    """One round of one system."""

    gaps_s: list[float]
    """Between tokens of the running answers, while prompts came or were computed."""
    ttft_s: list[float]
    """Of the long prompts."""


class Reader(threading.Thread):
    """Notes when the tokens of a stream come."""

    def __init__(self, stream: OutputStream):
        super().__init__(daemon=True)
        self.stream, self.times_s = stream, [time.perf_counter()]
        self.start()

    def run(self) -> None:
        for output in self.stream:
            if output.new_token_ids:
                self.times_s.append(time.perf_counter())


def measure(engine: ServingEngine, args: argparse.Namespace, random: np.random.Generator) -> Run:
    """Start the answers; while they run, send the prompts."""

    def request(name: str, num_tokens: int, max_tokens: int) -> Request:
        ids = random.integers(100, engine.spec.vocab_size - 100, num_tokens).tolist()
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        return Request(request_id=name, prompt_token_ids=ids, sampling=sampling)

    limit = engine.config.max_model_len
    assert limit is not None  # the config is resolved
    answers = [
        Reader(engine.submit_blocking(request(f"answer-{i}", ANSWER_PROMPT, limit - ANSWER_PROMPT)))
        for i in range(args.answers)
    ]
    while any(len(reader.times_s) <= SETTLED for reader in answers):
        time.sleep(0.005)
    begun_s = time.perf_counter()
    prompts, sent_s = [], []
    for i in range(args.prompts):
        time.sleep(max(begun_s + i * args.every - time.perf_counter(), 0))
        sent_s.append(time.perf_counter())
        prompts.append(Reader(engine.submit_blocking(request(f"prompt-{i}", args.prompt_tokens, args.prompt_answer))))
    for reader in prompts:
        reader.join()
    ended_s = max(reader.times_s[1] for reader in prompts)
    if not all(reader.is_alive() for reader in answers):
        raise BenchError("an answer ended before the prompts were done: raise --max-model-len, or send fewer prompts")
    for reader in answers:
        reader.stream.abort()
        reader.join()
    gaps = [
        after - before
        for reader in answers
        for before, after in zip(reader.times_s, reader.times_s[1:], strict=False)
        if after >= begun_s and before <= ended_s
    ]
    return Run(gaps, [reader.times_s[1] - sent for reader, sent in zip(prompts, sent_s, strict=True)])


def configs(args: argparse.Namespace, step_log: Path) -> dict[str, EngineConfig]:
    """Of each system. Whole prompts need steps that hold one."""
    chunked = engine_config(args)
    whole = dataclasses.replace(chunked, enable_chunked_prefill=False, max_num_batched_tokens=args.max_model_len)
    return {
        "whole prompts": whole,
        "chunked": dataclasses.replace(chunked, step_log=step_log),
        "disaggregated": chunked,
    }


def transfers(front: Disaggregated) -> dict[str, float]:
    """What moved, how fast, and what of the time nobody waited for."""
    link, totals = front.links[0], front.decode.handovers.incoming.totals
    sent = link._service.transfers  # type: ignore[attr-defined]  # a LocalLink
    return {
        "requests": totals.requests,
        "computed_by_the_decode_engine": totals.taken_over,
        "bytes": sent.num_bytes,
        "seconds": sent.seconds,
        "gb_per_s": sent.num_bytes / sent.seconds / 1e9 if sent.seconds else 0.0,
        "waited_s": totals.waited_s,
        "hidden": max(1 - totals.waited_s / sent.seconds, 0.0) if sent.seconds else 1.0,
    }


def link_bytes_per_s(front: Disaggregated) -> float:
    """Bytes a second of a batch of pages between the two devices while neither computes."""
    there, here = (engine.handovers.page_rows for engine in (front.decode, front.prefill[0]))
    rows = jax.device_put(np.ones(here.shape, here.dtype), here.sharding).block_until_ready()
    times = []
    for _ in range(8):
        started_s = time.perf_counter()
        jax.device_put(rows, there.sharding).block_until_ready()
        times.append(time.perf_counter() - started_s)
    return rows.nbytes / percentile(times, 50)


def goodput(
    args: argparse.Namespace, model: StepTimeModel, limits: dict[str, SchedulerLimits], network: Network
) -> list[dict[str, Any]]:
    """Requests a second within the limits, simulated, by rate and system; each has two engines."""
    rows = []
    for rate in args.rates:
        trace = make_trace(args.workload, num_requests=args.requests, rate=rate, seed=args.seed)
        row: dict[str, Any] = {"rate": rate}
        for name in SYSTEMS:
            apart = name == "disaggregated"
            spec = ReplicaSpec(limits=limits["chunked" if apart else name], step_time=model)
            placement: Placement | None = Pools(1, network) if apart else None
            second = dataclasses.replace(spec, continues=apart)
            simulation = Simulation((spec, second), trace, placement)
            while simulation.step():
                pass
            row[name] = simulation.result().goodput(ttft_s=args.ttft, tpot_s=args.tpot)
        rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> Result:
    """The command line."""
    args = _parser().parse_args(argv)
    jax.config.update("jax_num_cpu_devices", max(jax.config.jax_num_cpu_devices, 2))  # type: ignore[attr-defined]
    facts, progress = machine(), show_progress()
    runs: dict[str, list[Run]] = {name: [] for name in SYSTEMS}
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "steps.jsonl"
        settings = configs(args, log)
        engines: dict[str, ServingEngine] = {}
        try:
            for name in SYSTEMS[:2]:
                engines[name] = Engine.start(settings[name], progress=progress)
            [front] = start_pairs(settings["disaggregated"], num_prefill=1, num_decode=1, progress=progress)
            engines["disaggregated"] = front
            link = link_bytes_per_s(front)
            limits = {name: engine.limits for name, engine in engines.items()}  # type: ignore[attr-defined]
            facts |= engine_facts(front.name, front.config)
            for number in tqdm(range(args.rounds), desc="disagg", unit="round", disable=not progress):
                for name, engine in engines.items():
                    runs[name].append(measure(engine, args, np.random.default_rng([args.seed, number])))
            moved = transfers(front)
            shape, itemsize = front.decode.handovers.page_rows.shape, front.decode.handovers.page_rows.dtype.itemsize
        finally:
            for engine in engines.values():
                engine.shutdown()
        model = fit(read_step_log(log))
    per_token = int(np.prod(shape[1:])) // front.config.page_size * itemsize
    network = Network(bytes_per_token=per_token, bandwidth=link)
    simulated = goodput(args, model, limits, network)
    result = {
        "bench": "disagg",
        "seed": args.seed,
        "machine": facts,
        "systems": {name: _summary(rounds) for name, rounds in runs.items()},
        "transfer": {"idle_gb_per_s": link / 1e9, **moved},
        "goodput": simulated,
        "limits": {"ttft_s": args.ttft, "tpot_s": args.tpot, "workload": args.workload},
    }
    _report(result)
    save(args.json, result)
    if args.plot is not None:
        plot(result, runs, args.plot)
    return result


def plot(result: Result, runs: dict[str, list[Run]], file: Path) -> None:
    """Gaps between tokens as a distribution, and goodput by rate."""
    with picture(file, 2, size=(10, 4)) as (left, right):
        for name in SYSTEMS:
            distribution(left, (1e3 * gap for one in runs[name] for gap in one.gaps_s), label=name)
            right.plot(*zip(*((row["rate"], row[name]) for row in result["goodput"]), strict=True), "o-", label=name)
        left.set(xscale="log", xlabel="ms between tokens, while prompts come", ylabel="% of the gaps", ylim=(80, 100))
        rates = [row["rate"] for row in result["goodput"]]
        right.set(xscale="log", xlabel="requests a second", ylabel="of these within the limits (simulated)")
        right.set_xticks(rates, [f"{rate:g}" for rate in rates])
        right.minorticks_off()
        left.legend()
        right.legend()


def _summary(rounds: Sequence[Run]) -> dict[str, float]:
    gaps = [gap for one in rounds for gap in one.gaps_s]
    ttft = [value for one in rounds for value in one.ttft_s]
    percents = {f"itl_p{percent}_ms": 1e3 * percentile(gaps, percent) for percent in (50, 99, 100)}
    by_round = [1e3 * percentile(one.gaps_s, 99) for one in rounds]
    return {**percents, "itl_p99_ms_median_round": percentile(by_round, 50), "ttft_p50_s": percentile(ttft, 50)}


def _report(result: Result) -> None:
    rows = [
        [name, *(f"{one[key]:.1f}" for key in ("itl_p50_ms", "itl_p99_ms", "itl_p100_ms")), f"{one['ttft_p50_s']:.2f}"]
        for name, one in result["systems"].items()
    ]
    moved, limits = result["transfer"], result["limits"]
    print(f"machine: {describe(result['machine'])}")
    print(markdown_table(["system", "ITL p50 (ms)", "p99", "most", "TTFT p50 of the prompts (s)"], rows))
    print(
        f"KV: {moved['bytes'] / 1e6:.0f} MB of {moved['requests']} prompts at {moved['gb_per_s']:.2f} GB/s "
        f"({moved['idle_gb_per_s']:.2f} GB/s between idle devices), "
        f"{100 * moved['hidden']:.0f}% of the time hidden; {moved['computed_by_the_decode_engine']} prompts were "
        "computed by the decode engine"
    )
    print(
        f"simulated, two engines each, {limits['workload']}: requests/s with a first token within "
        f"{limits['ttft_s']:g} s and {1e3 * limits['tpot_s']:g} ms a token"
    )
    rates = [[f"{row['rate']:g}", *(f"{row[name]:.2f}" for name in SYSTEMS)] for row in result["goodput"]]
    print(markdown_table(["requests/s", *SYSTEMS], rates))


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("disagg", __doc__, seed=0, seed_help="of the prompts and of the simulated requests")
    add_engine_options(parser, max_num_seqs=16, max_model_len=4096)
    parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="default 3")
    parser.add_argument("--answers", type=positive, default=8, metavar="N", help="that run; default 8")
    parser.add_argument("--prompts", type=positive, default=6, metavar="N", help="that come; default 6")
    parser.add_argument("--prompt-tokens", type=positive, default=2048, metavar="N", help="of each; default 2048")
    parser.add_argument("--prompt-answer", type=positive, default=8, metavar="N", help="tokens after each; default 8")
    parser.add_argument("--every", type=float, default=2.0, metavar="S", help="seconds between prompts; default 2")
    parser.add_argument("--workload", default="azure-conv", help="of the simulation; default azure-conv")
    parser.add_argument("--requests", type=positive, default=300, metavar="N", help="simulated; default 300")
    rates = (0.25, 0.5, 1.0, 2.0, 4.0)
    parser.add_argument("--rates", type=float, nargs="+", default=rates, metavar="R", help="requests/s, simulated")
    parser.add_argument("--ttft", type=float, default=5.0, metavar="S", help="limit of the first token; default 5")
    parser.add_argument("--tpot", type=float, default=0.1, metavar="S", help="limit of a later token; default 0.1")
    add_plot_option(parser, "gaps and goodput")
    return parser


if __name__ == "__main__":
    raise SystemExit(run(main))
