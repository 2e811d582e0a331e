"""What every bench shares: the statement of the machine, percentiles, tables, JSON, and how a command ends."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

import jaxcb
from jaxcb.errors import JaxcbError

Result = dict[str, Any]
"""What a bench measured, as it goes to --json."""


class BenchError(JaxcbError):
    """A measurement failed, or would not be worth its name."""


class Spread(NamedTuple):
    """Middle and edges of repeated measurements."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """
        Raises:
            BenchError: there are no values.
        """
        values = list(values)
        return cls(percentile(values, 50), percentile(values, 10), percentile(values, 90))


def percentile(values: Iterable[float], percent: float) -> float:
    """With linear interpolation between neighbours, as numpy does it: the 50th of (1, 2) is 1.5.

    Raises:
        BenchError: there are no values.
    """
    values = list(values)
    if not values:
        raise BenchError(f"the {percent:g}th percentile needs at least one measurement, there is none")
    return float(np.percentile(values, percent))


def paired_ratio(values: Sequence[float], others: Sequence[float]) -> float:
    """Median of ``values[i] / others[i]``. Pairs are measured one right after the other, so that the machine's slow
    and fast minutes cancel, which they don't in a ratio of two medians.

    Raises:
        BenchError: the lengths differ, or there is no pair.
    """
    if len(values) != len(others):
        raise BenchError(f"a paired ratio needs as many values as others, got {len(values)} and {len(others)}")
    return percentile([value / other for value, other in zip(values, others, strict=True)], 50)


def machine() -> dict[str, Any]:
    """The machine, how busy it is with other things (so call it first), and the versions.

    Starts no jax backend: that would take a GPU's memory from the server measured.
    """
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_1min": round(psutil.getloadavg()[0], 2),
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "jax": importlib.metadata.version("jax"),
        "jaxcb": jaxcb.__version__,
    }


def describe(facts: Mapping[str, Any]) -> str:
    """Facts on one line: "cpu AMD EPYC, cores 2, ..."."""
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Aligned for a terminal, and Markdown for a README. The first column is left-aligned, the others right."""
    cells = [[*headers], *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(headers))]
    lines = [_line(line, widths) for line in cells]
    rule = "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])])
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])


def show_progress() -> bool:
    """Progress bars go to a terminal; a log file has no use for them."""
    return sys.stderr.isatty()


def make_parser(name: str, description: str | None, *, seed: int | None, seed_help: str) -> argparse.ArgumentParser:
    """A parser with the options that every bench has. ``seed`` is the default; ``seed_help`` explains a None."""
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{name}",
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = "" if seed is None else f"; default {seed}"
    parser.add_argument("--seed", type=int, default=seed, metavar="N", help=seed_help + default)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    return parser


def positive(text: str) -> int:
    """argparse type of counts."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def save(file: Path | None, result: Result) -> None:
    """Write a result as JSON, if a file was asked for."""
    if file is not None:
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def run(main: Callable[[], object]) -> int:
    """Exit status of a command: what can't work is one line on stderr and status 1."""
    try:
        main()
    except (JaxcbError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (
        cell.ljust(width) if i == 0 else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return f"| {' | '.join([first, *others])} |"
