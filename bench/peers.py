"""Replays a workload over HTTP: all requests at once, streamed, greedy, with exact answer lengths.

  python -m bench.peers                          starts python -m jaxcb.serve itself
  python -m bench.peers -- --max-num-seqs 16     the same with flags for the server
  python -m bench.peers --backend native --backend xla
                                                 ours twice, round by round in turn
  python -m bench.peers --url llama=http://127.0.0.1:8191 --start
                                                 that server and ours, round by round in turn

Runs alternate between the servers, since a shared machine has slow and fast minutes; ratios are medians over the rounds
of the first server (ours, with --start) to each other one. Every round begins all its prompts with a token that no
other round used, so that no server answers from its prefix cache.
"""

from __future__ import annotations

import argparse
import contextlib
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

from tqdm import tqdm

from bench.client import only_model, replay
from bench.common import (
    BenchError,
    Result,
    describe,
    machine,
    make_parser,
    markdown_table,
    paired_ratio,
    percentile,
    positive,
    run,
    save,
    show_progress,
)
from bench.server import serving
from bench.workload import COMMITTED, Item, Workload, read
from jaxcb.config import Backend

SINGLE_PROMPT, SINGLE_OUTPUT = 32, 128
_COLUMNS = {
    "out_tok_s": "out tok/s",
    "total_tok_s": "total tok/s",
    "ttft_p50_s": "TTFT p50 s",
    "ttft_p95_s": "TTFT p95 s",
    "tpot_p50_ms": "TPOT p50 ms",
    "tpot_p95_ms": "TPOT p95 ms",
    "wall_s": "wall s",
    "client_cpu_s": "client CPU s",
}
_RATIOS = ("out_tok_s", "ttft_p50_s", "tpot_p50_ms")

Metrics = dict[str, float]


class Server(NamedTuple):
    name: str
    url: str
    model: str


def measure(
    servers: Sequence[Server], workload: Workload, *, num_rounds: int, seed: int, progress: bool
) -> dict[str, list[Metrics]]:
    """Replay the workload on every server in turn: a round to warm up that doesn't count, then ``num_rounds``.

    Returns:
        Metrics of each counted round by server name.
    """
    openings = _openings(workload, num_rounds + 1, seed)
    rounds: dict[str, list[Metrics]] = {server.name: [] for server in servers}
    total = len(openings) * len(servers) * workload.num_output_tokens
    with tqdm(total=total, unit="token", disable=not progress) as bar:
        for number, opening in enumerate(openings):
            items = [Item([opening, *item.prompt_ids[1:]], item.output_len) for item in workload.items]
            for server in servers:
                bar.set_description(f"{server.name}, {f'round {number}' if number else 'warm-up'}")
                metrics = replay(server.url, server.model, items, on_token=bar.update).metrics()
                if number:
                    rounds[server.name].append(metrics)
    return rounds


def summarize(rounds: Mapping[str, Sequence[Metrics]]) -> Result:
    """Medians of every metric, the range of the throughput, and the ratios of the first server to the others."""
    first, *others = rounds
    return {
        "medians": {name: _medians(metrics) for name, metrics in rounds.items()},
        "out_tok_s_range": {
            name: [min(_series(metrics, "out_tok_s")), max(_series(metrics, "out_tok_s"))]
            for name, metrics in rounds.items()
        },
        "ratios": {
            f"{first} / {other}": {
                key: paired_ratio(_series(rounds[first], key), _series(rounds[other], key))
                for key in _RATIOS
                if all(key in metrics for metrics in [*rounds[first], *rounds[other]])
            }
            for other in others
        },
    }


def single(workload: Workload) -> Workload:
    """One request: a short prompt and a long answer, whose TPOT is the speed of one stream."""
    return Workload(workload.seed, [Item(workload.items[0].prompt_ids[:SINGLE_PROMPT], SINGLE_OUTPUT)])


def parse_server(text: str) -> tuple[str, str, str | None]:
    """Name, URL and model of ``[NAME=]URL[,MODEL]``; without a name it is called by its URL."""
    name, equals, rest = text.partition("=")
    if not equals or "/" in name:
        name, rest = "", text
    url, _, model = rest.partition(",")
    if not url.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"must be [NAME=]URL[,MODEL] with an http URL, got {text!r}")
    url = url.rstrip("/").removesuffix("/v1")
    return name or url.partition("://")[2], url, model or None


def main(argv: Sequence[str] | None = None) -> Result:
    """The command line."""
    args = _parse(argv)
    workload = single(read(args.workload)) if args.single else read(args.workload)
    seed = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    facts = machine()
    with contextlib.ExitStack() as stack:
        servers = [Server(name, url, model or args.model or only_model(url)) for name, url, model in args.url]
        ours = [(f"jaxcb {name}", ["--backend", name]) for name in args.backend]
        if not ours and (args.start or not servers):
            ours = [("jaxcb", [])]
        for place, (name, flags) in enumerate(ours):
            url = stack.enter_context(serving([*args.serve_flags, *flags]))
            servers.insert(place, Server(name, url, only_model(url)))
        if len({server.name for server in servers}) < len(servers):
            raise BenchError(f"two servers have the same name: {', '.join(server.name for server in servers)}")
        rounds = measure(servers, workload, num_rounds=args.rounds, seed=seed, progress=show_progress())
    summary = summarize(rounds)
    print(f"machine: {describe(facts)}")
    print(f"workload: {workload}; all at once, {args.rounds} rounds in turn, medians")
    print(_report(summary))
    result = {
        "bench": "peers",
        "machine": facts,
        "workload": str(workload),
        "seed": seed,
        "servers": [server._asdict() for server in servers],
        **summary,
        "rounds": rounds,
    }
    save(args.json, result)
    return result


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(
        "peers", __doc__, seed=None, seed_help="of the rounds' first tokens; default: other ones in every run"
    )
    parser.add_argument(
        "--url",
        type=parse_server,
        action="append",
        default=[],
        metavar="[NAME=]URL[,MODEL]",
        help="a running server; may be repeated",
    )
    parser.add_argument("--model", metavar="NAME", help="for servers that say none; default: the first they offer")
    parser.add_argument(
        "--backend",
        choices=get_args(Backend),
        action="append",
        default=[],
        help="start ours with this backend; may be repeated, the first is the one that ratios are of",
    )
    parser.add_argument("--start", action="store_true", help="start ours too (without --url it is always started)")
    parser.add_argument(
        "--single", action="store_true", help=f"one request: {SINGLE_PROMPT} prompt tokens, {SINGLE_OUTPUT} new ones"
    )
    parser.add_argument("--workload", type=Path, default=COMMITTED, metavar="FILE", help="default: bench/workload.json")
    parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="after one to warm up; default 3")
    parser.add_argument("serve_flags", nargs="*", metavar="-- FLAG", help="flags of python -m jaxcb.serve")
    return parser.parse_args(argv)


def _openings(workload: Workload, count: int, seed: int) -> list[int]:
    """Different token ids out of the workload's own, so that every server's vocabulary has them."""
    ids = sorted({token for item in workload.items for token in item.prompt_ids})
    if count > len(ids):
        raise BenchError(f"{count} rounds need as many different token ids, the workload has {len(ids)}")
    return random.Random(seed).sample(ids, count)


def _series(rounds: Sequence[Metrics], key: str) -> list[float]:
    return [metrics[key] for metrics in rounds]


def _medians(rounds: Sequence[Metrics]) -> Metrics:
    return {key: percentile(_series(rounds, key), 50) for key in _COLUMNS if all(key in metrics for metrics in rounds)}


def _report(summary: Result) -> str:
    lines = [
        [name, *(f"{medians[key]:.2f}" if key in medians else "-" for key in _COLUMNS)]
        for name, medians in summary["medians"].items()
    ]
    text = [markdown_table(["server", *_COLUMNS.values()], lines)]
    text += [f"{name}: {low:.1f} to {high:.1f} out tok/s" for name, (low, high) in summary["out_tok_s_range"].items()]
    for pair, ratios in summary["ratios"].items():
        text.append(f"{pair}: " + ", ".join(f"{_COLUMNS[key]} x{value:.2f}" for key, value in ratios.items()))
    return "\n".join(text)


if __name__ == "__main__":
    raise SystemExit(run(main))
