"""What a step's cost follows: the sequences and contexts in it, not the limits that the engine was started with.

First table: decode steps of 1 to 256 sequences by contexts of 128 to 8,000 tokens, as far as the KV cache holds them,
with the ratio to a linear fit over all of them (a + b * sequences + c * KV positions). Second: one and the same step in
an engine with narrow limits and in one with --factor times the context limit, the sequences and the pages, in turns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import nnls
from tqdm import tqdm

from bench.buckets import time_steps
from bench.common import (
    Result,
    describe,
    make_parser,
    markdown_table,
    paired_ratio,
    percentile,
    positive,
    run,
    save,
    show_progress,
)
from bench.full_step import full_plan
from bench.inprocess import InProcess, add_engine_options, engine_config
from jaxcb.step.buckets import Bucket

CONTEXTS = (128, 512, 2048, 8000)
NARROW = {"max_num_seqs": 8, "max_model_len": 512, "num_kv_pages": 512}
STEP = (8, 256)
"""Sequences and context of the step that both engines run."""


class Cell(NamedTuple):
    """One kind of step, and what it took."""

    sequences: int
    context: int
    ms: float

    @property
    def terms(self) -> tuple[float, float, float]:
        return 1.0, float(self.sequences), float(self.sequences * self.context)


def fitted_ms(cells: Sequence[Cell]) -> list[float]:
    """Times of a non-negative linear fit, by relative errors: a short step counts as much as a long one."""
    weights = np.array([1 / cell.ms for cell in cells])
    terms = np.array([cell.terms for cell in cells])
    coefficients, _ = nnls(terms * weights[:, None], np.ones(len(cells)))
    return (terms @ coefficients).tolist()


def measure(process: InProcess, contexts: Sequence[int], num_steps: int, *, progress: bool) -> list[Cell]:
    """Every cell that the engine has room for."""
    runner, sizes = process.runner, [bucket for bucket in process.runner.buckets if bucket.decode_only]
    shape = runner.shape
    fitting = [
        (bucket, context)
        for bucket in sizes
        for context in contexts
        if context < shape.max_model_len and bucket.num_seqs * -(-context // shape.page_size) <= shape.num_pages
    ]
    return [
        Cell(bucket.num_seqs, context, _median_ms(process, bucket, context, num_steps))
        for bucket, context in tqdm(fitting, desc="growth", unit="step", disable=not progress)
    ]


def main(argv: Sequence[str] | None = None) -> Result:
    """The command line."""
    parser = make_parser("growth", __doc__, seed=None, seed_help="of nothing: the steps are made up")
    add_engine_options(parser, max_num_seqs=256, max_model_len=8192)
    parser.add_argument("--steps", type=positive, default=10, metavar="N", help="timed for each cell; default 10")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="of the second table; default 5")
    parser.add_argument("--factor", type=positive, default=8, metavar="N", help="of the wide limits; default 8")
    args = parser.parse_args(argv)
    progress = show_progress()
    config = engine_config(args)
    if config.decode_buckets is None:
        config = dataclasses.replace(config, decode_buckets=(1, 4, 16, 64))
    wide_open = InProcess.load(dataclasses.replace(config, mixed_buckets=()))
    cells = measure(wide_open, CONTEXTS, args.steps, progress=progress)
    facts = wide_open.facts
    del wide_open

    narrow: dict[str, Any] = {**NARROW, "decode_buckets": STEP[:1], "mixed_buckets": (), "max_num_batched_tokens": 512}
    wide = narrow | {name: args.factor * value for name, value in NARROW.items()}
    both = [InProcess.load(dataclasses.replace(config, **limits)) for limits in (narrow, wide)]
    times: list[list[float]] = [[], []]
    for _ in tqdm(range(args.rounds), desc="limits", unit="round", disable=not progress):
        for process, spent in zip(both, times, strict=True):
            spent.append(_median_ms(process, Bucket(STEP[0], STEP[0], True), STEP[1], args.steps))
    limits = {
        "narrow": narrow,
        "wide": wide,
        "narrow_ms": percentile(times[0], 50),
        "wide_ms": percentile(times[1], 50),
        "ratio": paired_ratio(times[1], times[0]),
    }
    fitted = fitted_ms(cells)
    print(f"machine: {describe(facts)}")
    print(_table(cells, fitted))
    print(
        f"{STEP[0]} sequences at context {STEP[1]}: {limits['narrow_ms']:.2f} ms within narrow limits, "
        f"{limits['wide_ms']:.2f} ms within {args.factor} times as wide ones, {limits['ratio']:.3f} times"
    )
    result = {
        "bench": "growth",
        "machine": facts,
        "cells": [{**cell._asdict(), "fitted_ms": ms} for cell, ms in zip(cells, fitted, strict=True)],
        "limits": limits,
    }
    save(args.json, result)
    return result


def _median_ms(process: InProcess, bucket: Bucket, context: int, num_steps: int) -> float:
    plan = full_plan(bucket, process.runner.shape, context)
    return percentile(time_steps(process.runner, plan, num_steps, run_ahead=process.config.run_ahead), 50) * 1e3


def _table(cells: Sequence[Cell], fitted: Sequence[float]) -> str:
    by_place = {(cell.sequences, cell.context): (cell.ms, ms) for cell, ms in zip(cells, fitted, strict=True)}
    contexts = sorted({cell.context for cell in cells})
    rows = []
    for sequences in sorted({cell.sequences for cell in cells}):
        row = [str(sequences)]
        for context in contexts:
            measured = by_place.get((sequences, context))
            row.append("-" if measured is None else f"{measured[0]:.1f} ({measured[0] / measured[1]:.2f})")
        rows.append(row)
    headers = ["sequences", *(f"context {context}" for context in contexts)]
    return f"ms a step (over the linear fit)\n{markdown_table(headers, rows)}"


if __name__ == "__main__":
    raise SystemExit(run(main))
