"""Pictures of results, as PNG: systems side by side, throughput against latency, a run step by step.

Drawn without pyplot, which takes seconds to import and wants a screen.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from jaxcb.errors import ConfigError
from jaxcb.sim.comparison import Row
from jaxcb.sim.result import RequestRecord
from jaxcb.sim.sweep import Point, front
from jaxcb.sim.timeline import CHUNK, DECODE, WAITING, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE, _YELLOW, _GREY, _INK = "#33658a", "#f2b84b", "#e4e4e4", "#333333"
_LOG_FROM = 50
"""Bars are on a logarithmic scale where the longest is so many times the median."""
_LINES = ("#33658a", "#d1495b", "#66a182", "#edae49", "#8d5a97", "#2e4057")


def draw_comparison(rows: Sequence[Row], file: Path, *, title: str) -> None:
    """A row of bars a system: throughput, goodput, p99 of TTFT and TPOT, KV memory wasted.

    Raises:
        ConfigError: the file can't be written.
    """
    columns: list[tuple[str, list[float], str]] = [
        ("output tok/s", [row.result.output_tokens_per_s for row in rows], "{:,.0f}"),
        ("goodput, requests/s", [row.goodput for row in rows], "{:.2f}"),
        ("TTFT p99, s", [row.result.ttft.p99 if row.result.ttft else 0.0 for row in rows], "{:.2f}"),
        ("TPOT p99, ms", [row.result.tpot.p99 * 1e3 if row.result.tpot else 0.0 for row in rows], "{:.1f}"),
        ("KV held and empty, %", [row.result.kv_waste * 100 for row in rows], "{:.0f}"),
    ]
    figure = _figure(15.0, 1.6 + 0.34 * max(len(rows), 1))
    axes = figure.subplots(1, len(columns), sharey=True)
    for number, (axis, (label, values, form)) in enumerate(zip(axes, columns, strict=True)):
        _bars(axis, label, values, form, better_is_more=number < 2)
    axes[0].set_yticks(range(len(rows)), [row.name for row in rows], fontsize=9)
    axes[0].set_ylim(len(rows) - 0.4, -0.6)
    figure.suptitle(title, fontsize=11)
    _save(figure, file)


def draw_sweep(points: Sequence[Point], file: Path, *, title: str) -> None:
    """Throughput over the p99 of the gaps between tokens: a line for each number of sequences, and the Pareto front.

    Raises:
        ConfigError: the file can't be written.
    """
    from matplotlib.ticker import LogLocator

    figure = _figure(9.0, 5.5)
    axes = figure.subplots()
    best = front(points)
    axes.plot(
        [point.itl_p99_s * 1e3 for point in best],
        [point.tokens_per_s for point in best],
        color=_YELLOW,
        linewidth=7,
        alpha=0.6,
        label="Pareto front",
        zorder=1,
    )
    for number, seqs in enumerate(sorted({point.num_seqs for point in points})):
        line = sorted((point for point in points if point.num_seqs == seqs), key=lambda point: point.budget)
        x, y = [point.itl_p99_s * 1e3 for point in line], [point.tokens_per_s for point in line]
        axes.plot(
            x, y, marker="o", markersize=4, color=_LINES[number % len(_LINES)], label=f"{seqs} sequences", zorder=2
        )
        for point, at_x, at_y in zip(line, x, y, strict=True):
            if point in best:
                axes.annotate(
                    f"{point.budget:,}", (at_x, at_y), xytext=(4, -11), textcoords="offset points", fontsize=8
                )
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_xlabel("p99 of the time between tokens, ms")
    axes.set_ylabel("output tok/s")
    axes.set_ylim(bottom=0)
    axes.grid(color=_GREY, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    axes.set_title(title + "\n(numbers: token budget)", fontsize=10)
    _save(figure, file)


def draw_timeline(timeline: Timeline, records: Sequence[RequestRecord], file: Path) -> None:
    """A row a request, a column a step: P where a chunk of its prompt runs, d where it decodes.

    Raises:
        ConfigError: the file can't be written.
    """
    from matplotlib.patches import Patch, Rectangle

    lines = timeline.lines(records)
    colors = {CHUNK: (_BLUE, "white"), DECODE: (_YELLOW, _INK), WAITING: (_GREY, _GREY)}
    num_steps = max(timeline.num_columns, 1)
    figure = _figure(max(2.0 + 0.22 * num_steps, 7.0), 1.5 + 0.24 * max(len(lines), 1))
    axes = figure.subplots()
    for y, (_, cells) in enumerate(lines):
        for x, cell in enumerate(cells):
            if cell in colors:
                fill, ink = colors[cell]
                axes.add_patch(Rectangle((x - 0.46, y - 0.42), 0.92, 0.84, facecolor=fill, linewidth=0))
                if cell != WAITING:
                    axes.text(x, y, cell, ha="center", va="center", color=ink, fontsize=7)
    axes.set_xlim(-0.6, num_steps - 0.4)
    ticks = [0, *range(9, num_steps, 10)]
    axes.set_xticks(ticks, [str(tick + 1) for tick in ticks])
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.set_yticks(range(len(lines)), [label for label, _ in lines], fontsize=8)
    axes.set_ylabel("request: prompt + answer", fontsize=9)
    axes.set_xlabel("step: one forward pass a column", fontsize=9)
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
    labels = {CHUNK: "P: a chunk of the prompt", DECODE: "d: a token of the answer", WAITING: "waiting"}
    handles = [Patch(facecolor=colors[cell][0], label=label) for cell, label in labels.items()]
    axes.legend(handles=handles, ncols=3, loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize=8)
    _save(figure, file)


def _bars(axes: Axes, label: str, values: list[float], form: str, *, better_is_more: bool) -> None:
    best = (max if better_is_more else min)(values, default=0.0)
    colors = [_YELLOW if abs(value - best) <= 0.005 * abs(best) else _BLUE for value in values]
    axes.barh(range(len(values)), values, height=0.7, color=colors)
    smallest, largest = min(values, default=0.0), max([*values, 1e-9])
    spread = smallest > 0 and largest > _LOG_FROM * median(values)
    for y, value in enumerate(values):
        after = value * 1.15 if spread else value + 0.02 * largest
        axes.text(after, y, form.format(value), va="center", fontsize=8, color=_INK)
    if spread:  # else the largest would leave the others no length
        axes.set_xscale("log")
        axes.set_xlim(smallest / 2, largest * (2 * largest / smallest) ** 0.25)
        axes.minorticks_off()
    else:
        axes.set_xlim(0, 1.25 * largest)
    axes.set_title(f"{label} (log)" if spread else label, fontsize=9)
    axes.tick_params(length=0)
    axes.set_xticks([])
    axes.spines[:].set_visible(False)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, file: Path) -> None:
    try:
        figure.savefig(file, dpi=110)
    except OSError as error:
        raise ConfigError(f"--plot: can't write {file}: {error}", param="plot") from error
