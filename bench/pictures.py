"""Pictures of results. Drawn without pyplot, which takes seconds to import and wants a screen."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def add_plot_option(parser: argparse.ArgumentParser, what: str) -> None:
    """``--plot FILE.png``; ``what`` it shows, for the help."""
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help=f"draw {what}, with matplotlib")


@contextmanager
def picture(file: Path, columns: int = 1, *, size: tuple[float, float]) -> Iterator[list[Axes]]:
    """Axes side by side to draw on; the PNG is written on the way out. ``size`` is in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    yield list(figure.subplots(1, columns, squeeze=False)[0])
    figure.savefig(file, dpi=110)


def distribution(axes: Axes, values: Iterable[float], **style: object) -> None:
    """Which part of the values is at most so large, in percent."""
    ordered = sorted(values)
    axes.plot(ordered, [100 * (i + 1) / len(ordered) for i in range(len(ordered))], **style)  # type: ignore[arg-type]  # matplotlib's own words


def bars(axes: Axes, labels: Sequence[str], heights: Sequence[float], errors: Sequence[tuple[float, float]]) -> None:
    """A bar for each label, with how far the measurements go below and above it."""
    below, above = zip(*errors, strict=True)
    axes.bar(range(len(labels)), heights, yerr=[below, above], color="#33658a", ecolor="#777777", capsize=3)
    axes.set_xticks(range(len(labels)), labels, rotation=45, ha="right")
    axes.grid(alpha=0.3, axis="y")
