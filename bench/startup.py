"""From the command to the first answer: python -m jaxcb.serve with nothing compiled yet, and with everything kept.

  python -m bench.startup                        one cold start, five warm ones
  python -m bench.startup -- --max-num-seqs 8    the same with flags for the server

Cold: no compiled programs and no compiled kernels; the model is there. Warm: the same again. "ready" is the time until
the server accepts connections, "first token" that of a request of eight tokens sent then.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
from tqdm import tqdm

from bench.common import (
    Result,
    Spread,
    describe,
    machine,
    make_parser,
    markdown_table,
    positive,
    run,
    save,
    show_progress,
)
from bench.pictures import add_plot_option, bars, picture
from bench.server import serving
from jaxcb.cache import cache_dir

COMPILED = {"programs", "native"}
"""Folders of the cache that a cold start has to fill."""


def measure(flags: Sequence[str]) -> dict[str, float]:
    """Seconds of one start, from the command on."""
    begun_s = time.perf_counter()
    with serving(flags) as url:
        ready_s = time.perf_counter()
        body = {"prompt": [1, 2, 3, 4, 5, 6, 7, 8], "max_tokens": 1, "temperature": 0}
        httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()
        answered_s = time.perf_counter()
    return {"ready_s": ready_s - begun_s, "first_token_s": answered_s - ready_s}


def main(argv: Sequence[str] | None = None) -> Result:
    """The command line."""
    args = _parse(argv)
    facts = machine()
    starts: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    with tqdm(total=1 + args.cold + args.rounds, unit="start", disable=not show_progress()) as bar:
        bar.set_description("fetching the model, if need be")
        measure(args.serve_flags)
        bar.update()
        for kind, count in (("cold", args.cold), ("warm", args.rounds)):
            bar.set_description(kind)
            for _ in range(count):
                if kind == "cold":
                    with _empty_cache():
                        starts[kind].append(measure(args.serve_flags))
                else:
                    starts[kind].append(measure(args.serve_flags))
                bar.update()
    spreads = {
        kind: {name: Spread.of(start[name] for start in each) for name in ("ready_s", "first_token_s")}
        for kind, each in starts.items()
    }
    print(f"machine: {describe(facts)}")
    print(_table(spreads))
    result = {
        "bench": "startup",
        "machine": facts,
        "flags": args.serve_flags,
        "starts": starts,
        "spread": {kind: {name: spread._asdict() for name, spread in each.items()} for kind, each in spreads.items()},
    }
    save(args.json, result)
    if args.plot is not None:
        plot(spreads, args.plot)
    return result


def plot(spreads: dict[str, dict[str, Spread]], file: Path) -> None:
    """Seconds to ready and to the first token, of cold and warm starts."""
    with picture(file, 2, size=(7, 3)) as panels:
        for axes, name in zip(panels, ("ready_s", "first_token_s"), strict=True):
            found = [each[name] for each in spreads.values()]
            edges = [(one.median - one.p10, one.p90 - one.median) for one in found]
            bars(axes, list(spreads), [one.median for one in found], edges)
            axes.set_ylabel(name.removesuffix("_s").replace("_", " ") + ", s")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("startup", __doc__, seed=None, seed_help="of nothing: a start draws no numbers")
    parser.add_argument("--cold", type=positive, default=1, metavar="N", help="cold starts; default 1")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="warm starts; default 5")
    add_plot_option(parser, "the times")
    parser.add_argument("serve_flags", nargs="*", metavar="-- FLAG", help="flags of python -m jaxcb.serve")
    return parser.parse_args(argv)


@contextmanager
def _empty_cache() -> Iterator[None]:
    """For the servers started meanwhile, a cache that holds the models of ours and nothing compiled."""
    before = os.environ.get("JAXCB_CACHE")
    with tempfile.TemporaryDirectory(prefix="jaxcb-startup-") as scratch:
        for path in cache_dir().iterdir():
            if path.name not in COMPILED:
                (Path(scratch) / path.name).symlink_to(path.resolve())
        os.environ["JAXCB_CACHE"] = scratch
        try:
            yield
        finally:
            if before is None:
                del os.environ["JAXCB_CACHE"]
            else:
                os.environ["JAXCB_CACHE"] = before


def _table(spreads: dict[str, dict[str, Spread]]) -> str:
    rows = [
        [
            kind,
            *(f"{value:.2f}" for value in each["ready_s"]),
            f"{each['first_token_s'].median:.3f}",
        ]
        for kind, each in spreads.items()
    ]
    return markdown_table(["start", "ready s (median)", "p10", "p90", "first token s"], rows)


if __name__ == "__main__":
    raise SystemExit(run(main))
