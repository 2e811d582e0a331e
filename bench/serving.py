"""A server under load: throughput, and the latencies that its users see, with ShareGPT-like lengths.

  python -m bench.serving --rate 0.5                    starts python -m jaxcb.serve itself; arrivals are Poisson
  python -m bench.serving --concurrency 8               eight users, who wait for answers before they ask again
  python -m bench.serving --url http://127.0.0.1:8191   that server
  python -m bench.serving --rate 1 -- --preset sarathi  flags for the server

The figures are named as `vllm bench serve` names them: TTFT to the first token, TPOT a token after the first (mean of a
request), ITL between two chunks, E2EL to the last token; goodput counts the requests that keep every --goodput limit.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from bench.client import Answer, Replay, only_model, replay
from bench.common import (
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
from bench.peers import Server, parse_server
from bench.pictures import add_plot_option, distribution, picture
from bench.server import serving
from bench.workload import SEED, SHAREGPT_OUTPUTS, SHAREGPT_PROMPTS, Workload, make, read
from jaxcb.text import Tokenizer

if TYPE_CHECKING:
    pass

LATENCIES = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (50, 90, 99)


def arrivals(num_requests: int, rate: float, seed: int) -> list[float]:
    """Seconds at which requests of a Poisson process come; an infinite rate: all at once."""
    if math.isinf(rate):
        return [0.0] * num_requests
    gaps = np.random.default_rng(seed).exponential(1 / rate, num_requests)
    return (np.cumsum(gaps) - gaps[0]).tolist()


def latencies_ms(answers: Sequence[Answer]) -> dict[str, list[float]]:
    """Of all requests (ITL: of all gaps), by name."""
    seconds = {
        "ttft": [answer.ttft_s for answer in answers],
        "tpot": [tpot for answer in answers if (tpot := answer.tpot_s) is not None],
        "itl": [gap for answer in answers for gap in answer.gaps_s],
        "e2el": [answer.latency_s for answer in answers],
    }
    return {name: [value * 1e3 for value in values] for name, values in seconds.items()}


def met(answer: Answer, limits_ms: Mapping[str, float]) -> bool:
    """Whether a request keeps every limit."""
    values = {"ttft": answer.ttft_s, "tpot": answer.tpot_s or 0.0, "e2el": answer.latency_s}
    return all(values[name] * 1e3 <= limit for name, limit in limits_ms.items())


def summarize(done: Replay, limits_ms: Mapping[str, float]) -> Result:
    """Rates, goodput, and mean and percentiles of every latency."""
    count, wall_s = len(done.answers), done.wall_s
    num_output_tokens = sum(answer.num_tokens for answer in done.answers)
    summary: Result = {
        "requests": count,
        "duration_s": wall_s,
        "prompt_tokens": done.num_prompt_tokens,
        "output_tokens": num_output_tokens,
        "requests_per_s": count / wall_s,
        "out_tok_s": num_output_tokens / wall_s,
        "total_tok_s": (done.num_prompt_tokens + num_output_tokens) / wall_s,
        "client_cpu_s": done.client_cpu_s,
    }
    if limits_ms:
        summary["goodput_per_s"] = sum(met(answer, limits_ms) for answer in done.answers) / wall_s
    for name, values in latencies_ms(done.answers).items():
        if values:
            summary[f"{name}_ms"] = {"mean": float(np.mean(values))} | {
                f"p{percent}": percentile(values, percent) for percent in PERCENTILES
            }
    return summary


def main(argv: Sequence[str] | None = None) -> Result:
    """The command line."""
    args = _parse(argv)
    facts = machine()
    rate = math.inf if args.rate is None else args.rate
    limits_ms = dict(args.goodput)
    with contextlib.ExitStack() as stack:
        if args.url is None:
            url = stack.enter_context(serving(args.serve_flags))
            server = Server("jaxcb", url, only_model(url))
        else:
            name, url, model = args.url
            server = Server(name, url, model or only_model(url))
        workload = _workload(args)
        with tqdm(total=workload.num_output_tokens, unit="token", disable=not show_progress()) as bar:
            if args.warm_up:
                bar.set_description("warm-up")
                replay(server.url, server.model, [dataclasses.replace(workload.items[0], output_len=4)])
            bar.set_description("serving")
            done = replay(
                server.url,
                server.model,
                workload.items,
                starts_s=arrivals(len(workload.items), rate, args.seed),
                concurrency=args.concurrency,
                on_token=bar.update,
            )
    summary = summarize(done, limits_ms)
    print(f"machine: {describe(facts)}")
    load = f"{args.concurrency} users" if args.concurrency else "all at once" if math.isinf(rate) else f"{rate:g}/s"
    print(f"workload: {workload}; {load}; {server.name}")
    print(_report(summary, limits_ms))
    if args.plot is not None:
        plot(done.answers, args.plot)
    result = {
        "bench": "serving",
        "machine": facts,
        "server": server._asdict(),
        "flags": args.serve_flags,
        "workload": str(workload),
        "rate": None if math.isinf(rate) else rate,
        "concurrency": args.concurrency,
        "goodput_limits_ms": limits_ms,
        "summary": summary,
    }
    save(args.json, result)
    return result


def plot(answers: Sequence[Answer], file: Path) -> None:
    """Draw the distribution of every latency."""
    with picture(file, len(LATENCIES), size=(10, 3)) as panels:
        for axes, (name, values) in zip(panels, latencies_ms(answers).items(), strict=True):
            distribution(axes, values)
            axes.set(xlabel=f"{name.upper()}, ms", ylabel="% at most", ylim=(0, 102))
            axes.set_xlim(left=0)
            axes.grid(alpha=0.3)


def _report(summary: Result, limits_ms: Mapping[str, float]) -> str:
    rates = [
        ["requests/s", f"{summary['requests_per_s']:.2f}"],
        ["output tok/s", f"{summary['out_tok_s']:.1f}"],
        ["total tok/s", f"{summary['total_tok_s']:.1f}"],
        ["duration s", f"{summary['duration_s']:.1f}"],
    ]
    if limits_ms:
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in limits_ms.items())
        rates.append([f"goodput/s ({limits})", f"{summary['goodput_per_s']:.2f}"])
    rows = [
        [name.upper(), *(f"{value:.1f}" for value in summary[f"{name}_ms"].values())]
        for name in LATENCIES
        if f"{name}_ms" in summary
    ]
    headers = ["ms", "mean", *(f"p{percent}" for percent in PERCENTILES)]
    return f"{markdown_table(['rate', ''], rates)}\n\n{markdown_table(headers, rows)}"


def _workload(args: argparse.Namespace) -> Workload:
    if args.workload is not None:
        return read(args.workload)
    from jaxcb.weights import resolve

    lengths = [lengths.scaled(args.scale) for lengths in (SHAREGPT_PROMPTS, SHAREGPT_OUTPUTS)]
    tokenizer = Tokenizer.from_dir(resolve(args.tokenizer).directory)
    return make(tokenizer, args.seed, args.num_requests, prompts=lengths[0], outputs=lengths[1])


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("serving", __doc__, seed=SEED, seed_help="of lengths and arrivals")
    parser.add_argument("--url", type=parse_server, metavar="[NAME=]URL[,MODEL]", help="default: start ours")
    parser.add_argument("--rate", type=_rate, metavar="R", help="requests a second, Poisson; default: all at once")
    parser.add_argument("--concurrency", type=positive, metavar="N", help="most requests open at a time")
    parser.add_argument("--num-requests", type=positive, default=64, metavar="N", help="default 64")
    parser.add_argument("--scale", type=_rate, default=1.0, metavar="F", help="of all lengths, for slow machines")
    parser.add_argument("--workload", type=Path, metavar="FILE", help="instead of drawn lengths")
    parser.add_argument("--tokenizer", metavar="DIR|ID", help="of the served model; default: the built-in one's")
    parser.add_argument(
        "--goodput",
        type=_limit,
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="limits in milliseconds on ttft, tpot or e2el, as ttft:500 tpot:50",
    )
    parser.add_argument("--no-warm-up", action="store_false", dest="warm_up", help="leave the first request out")
    add_plot_option(parser, "the distributions")
    parser.add_argument("serve_flags", nargs="*", metavar="-- FLAG", help="flags of python -m jaxcb.serve")
    return parser.parse_args(argv)


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return value


def _limit(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in ("ttft", "tpot", "e2el"):
        raise argparse.ArgumentTypeError(f"must be ttft:MS, tpot:MS or e2el:MS, got {text!r}")
    return name, _rate(limit)


if __name__ == "__main__":
    raise SystemExit(run(main))
