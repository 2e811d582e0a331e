"""Draws continuous batching: a row a request, a column a step, from a real run of the scheduler and the model.

A few requests of different lengths arrive at different steps at an engine with a tiny token budget. P is a chunk of the
prompt, with its number of tokens, and the last chunk gives the answer's first token; d is one more token of the answer;
a dot is a step spent waiting.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from bench.common import Result, describe, make_parser, positive, run, save, show_progress
from bench.inprocess import InProcess, LaunchedStep, add_engine_options, engine_config, exact_length
from bench.workload import Item, Lengths, make
from jaxcb.text import Tokenizer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PROMPTS = Lengths(median=14, sigma=0.8, low=4, high=40)
OUTPUTS = Lengths(median=7, sigma=0.5, low=3, high=14)
MEAN_STEPS_BETWEEN_ARRIVALS = 1.3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrival:
    """``step``: number of the first step that the request could have been part of."""

    name: str
    step: int
    item: Item

    def __str__(self) -> str:
        return f"{self.name}  {len(self.item.prompt_ids)} + {self.item.output_len}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeline:
    """What a run did. ``budget`` is the most tokens that a step may have."""

    arrivals: Sequence[Arrival]
    steps: Sequence[LaunchedStep]
    budget: int

    def cells(self, arrival: Arrival) -> list[str]:
        """A word for each step: "P12" or "d" computed, "." waited, "" before the arrival and after the end."""
        cells = [""] * len(self.steps)
        last = 0
        for number, step in enumerate(self.steps):
            for row in step.rows:
                if row.request_id == arrival.name:
                    cells[number] = "d" if row.decode else f"P{row.num_tokens}"
                    last = number
        return [cell or ("." if arrival.step <= i < last else "") for i, cell in enumerate(cells)]


def draw_arrivals(tokenizer: Tokenizer, seed: int, num_requests: int) -> list[Arrival]:
    """Requests A, B, C, ... in the order of their coming; the first two come at step 0."""
    rng = np.random.default_rng(seed)
    gaps = rng.poisson(MEAN_STEPS_BETWEEN_ARRIVALS, num_requests)
    gaps[:2] = 0
    items = make(tokenizer, seed, num_requests, prompts=PROMPTS, outputs=OUTPUTS).items
    names = [chr(ord("A") + i) for i in range(num_requests)]
    return [
        Arrival(name=name, step=int(step), item=item)
        for name, step, item in zip(names, np.cumsum(gaps), items, strict=True)
    ]


def run_timeline(process: InProcess, arrivals: Sequence[Arrival], *, progress: bool) -> Timeline:
    """Step the engine until every request is done, handing each over before the step that it comes for."""
    core, noting = process.new_core()
    left = list(arrivals)
    with tqdm(desc="running", unit="step", disable=not progress) as bar:
        while left or core.has_work:
            while left and (left[0].step <= core.num_steps or not core.has_work):
                arrival = left.pop(0)
                core.add(exact_length(arrival.name, arrival.item))
            core.step()
            bar.update()
    budget = process.config.max_num_batched_tokens
    assert budget is not None, "the config is resolved"
    return Timeline(arrivals=arrivals, steps=noting.steps, budget=budget)


def as_text(timeline: Timeline) -> str:
    """The picture for a terminal; the last line counts each step's tokens."""
    labels = ["step", *map(str, timeline.arrivals), "tokens"]
    lines = [
        [str(number) for number in range(len(timeline.steps))],
        *(timeline.cells(arrival) for arrival in timeline.arrivals),
        [str(step.num_tokens) for step in timeline.steps],
    ]
    label_width = max(map(len, labels))
    width = max(len(cell) for line in lines for cell in line)
    return "\n".join(
        f"{label.ljust(label_width)} |{''.join(f' {cell:>{width}}' for cell in line)}".rstrip()
        for label, line in zip(labels, lines, strict=True)
    )


def save_png(timeline: Timeline, file: Path) -> None:
    """The picture for a README. Draws without pyplot, which takes seconds to import and wants a screen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_steps, num_rows = len(timeline.steps), len(timeline.arrivals)
    width = max(2.2 + 0.33 * num_steps, 9.5)  # the legend needs as much
    figure = Figure(figsize=(width, 1.6 + 0.33 * num_rows + 1.1), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[0.33 * num_rows, 1.1])
    _draw_rows(top, timeline)
    _draw_budget(bottom, timeline)
    figure.align_ylabels([top, bottom])
    figure.savefig(file, dpi=110)


_COLORS = {".": ("#e4e4e4", "#777777"), "P": ("#33658a", "white"), "d": ("#f2b84b", "#333333")}
"""Fill and text of a cell, by its first letter."""


def _draw_rows(axes: Axes, timeline: Timeline) -> None:
    from matplotlib.patches import Patch, Rectangle

    for y, arrival in enumerate(timeline.arrivals):
        for x, cell in enumerate(timeline.cells(arrival)):
            if cell:
                fill, ink = _COLORS[cell[0]]
                axes.add_patch(Rectangle((x - 0.46, y - 0.42), 0.92, 0.84, facecolor=fill, linewidth=0))
                text = "" if cell == "." else cell
                axes.text(x, y, text, ha="center", va="center", color=ink, fontsize=7.5)
    axes.set_ylim(len(timeline.arrivals) - 0.4, -0.6)
    axes.set_yticks(range(len(timeline.arrivals)), list(map(str, timeline.arrivals)), fontsize=8.5)
    axes.set_ylabel("request: prompt + answer", fontsize=8.5)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    kinds = {
        "P": "P: tokens of the prompt (the last of them give the answer's first token)",
        "d": "d: one more token of the answer",
        ".": "waiting",
    }
    handles = [Patch(facecolor=_COLORS[kind][0], label=label) for kind, label in kinds.items()]
    axes.legend(handles=handles, ncols=3, loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize=8.5)


def _draw_budget(axes: Axes, timeline: Timeline) -> None:
    numbers = range(len(timeline.steps))
    decodes = [sum(row.num_tokens for row in step.rows if row.decode) for step in timeline.steps]
    prompts = [step.num_tokens - count for step, count in zip(timeline.steps, decodes, strict=True)]
    axes.bar(numbers, decodes, width=0.92, color=_COLORS["d"][0])
    axes.bar(numbers, prompts, width=0.92, bottom=decodes, color=_COLORS["P"][0])
    axes.axhline(timeline.budget, color="#777777", linewidth=1, linestyle="--")
    axes.set_xlim(-0.6, len(timeline.steps) - 0.4)
    axes.set_xticks(numbers, list(map(str, numbers)), fontsize=7.5)
    axes.set_xlabel("step")
    axes.set_yticks([0, timeline.budget], ["0", f"budget {timeline.budget}"], fontsize=8.5)
    axes.set_ylabel("tokens", fontsize=8.5)
    axes.tick_params(axis="x", length=0)
    axes.spines[["top", "right"]].set_visible(False)


def main(argv: Sequence[str] | None = None) -> Result:
    """The command line."""
    parser = make_parser("timeline", __doc__, seed=9, seed_help="of the lengths and the arrivals")
    add_engine_options(parser, max_num_seqs=4, max_num_batched_tokens=16)
    parser.set_defaults(decode_buckets=(), mixed_buckets=())
    parser.add_argument("--num-requests", type=positive, choices=range(1, 27), default=8, metavar="N", help="default 8")
    parser.add_argument("--out", type=Path, metavar="FILE.png", help="draw it there, with matplotlib")
    args = parser.parse_args(argv)

    process = InProcess.load(engine_config(args))
    arrivals = draw_arrivals(process.tokenizer, args.seed, args.num_requests)
    timeline = run_timeline(process, arrivals, progress=show_progress())
    print(f"machine: {describe(process.facts)}")
    print(as_text(timeline))
    if args.out is not None:
        save_png(timeline, args.out)
    result = {
        "bench": "timeline",
        "machine": process.facts,
        "seed": args.seed,
        "budget": timeline.budget,
        "tokens": [step.num_tokens for step in timeline.steps],
        "requests": {arrival.name: {"step": arrival.step, "cells": timeline.cells(arrival)} for arrival in arrivals},
    }
    save(args.json, result)
    return result


if __name__ == "__main__":
    raise SystemExit(run(main))
