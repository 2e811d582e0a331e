"""What the commands print: plain text of at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from jaxcb.presets import PRESETS
from jaxcb.scheduler import SchedulerLimits
from jaxcb.sim.comparison import Row
from jaxcb.sim.reference import Totals
from jaxcb.sim.result import Distribution, Result
from jaxcb.sim.sweep import Point, front

REFERENCE_HEADER = f"{'':30}{'tok/s':>8}{'seconds':>10}{'steps':>8}{'tokens':>12}{'preempted':>11}"


def reference_row(name: str, totals: Totals) -> str:
    """A row of the reference table, under ``REFERENCE_HEADER``."""
    return (
        f"{name:30}{totals.tokens_per_s:8.0f}{totals.seconds:10.2f}{totals.num_steps:8,}"
        f"{totals.num_step_tokens:12,}{totals.num_preemptions:11,}"
    )


def limits_line(limits: SchedulerLimits, *, run_ahead: bool) -> str:
    """The scheduler's limits in a line."""
    caching = "on" if limits.enable_prefix_caching else "off"
    return (
        f"{limits.num_kv_pages:,} KV pages of {limits.page_size} tokens, {limits.max_num_seqs} sequences, budget "
        f"{limits.max_num_batched_tokens:,}, prefix caching {caching}, run-ahead {'on' if run_ahead else 'off'}"
    )


def result_table(result: Result) -> str:
    """Throughput, times and use of a run."""
    finished = f"{len(result.finished):,} of {len(result.requests):,} requests"
    refused = f", {result.num_refused:,} refused (longer than the context)" if result.num_refused else ""
    steps = max(result.num_steps, 1)
    cached = result.num_cached_tokens / max(result.num_prompt_tokens, 1)
    return "\n".join(
        [
            f"finished     {finished}{refused} in {result.duration_s:,.1f} s",
            f"throughput   {result.output_tokens_per_s:,.0f} tok/s, {result.requests_per_s:,.2f} requests/s",
            "",
            f"{'':11}{'mean':>10}{'p50':>10}{'p95':>10}{'p99':>10}{'max':>10}",
            _times("TTFT, ms", result.ttft, 1e3),
            _times("TPOT, ms", result.tpot, 1e3),
            _times("ITL, ms", result.itl, 1e3),
            _times("latency, s", result.latency, 1.0),
            "",
            f"steps        {result.num_steps:,} of {result.num_step_tokens / steps:,.1f} tokens and "
            f"{result.mean_running:,.1f} sequences; the device was busy {result.busy_s:,.1f} s",
            f"KV pages     {result.mean_kv_use:.1%} in use, {result.peak_kv_use:.1%} at most; "
            f"{result.num_preemptions:,} preemptions; {cached:.1%} of prompt tokens cached",
        ]
    )


def comparison_tables(rows: Sequence[Row]) -> str:
    """Two tables over the same systems: speed, then memory and cost."""
    width = max([len(row.name) for row in rows], default=0) + 1
    names = (("tok/s", 8), ("goodput", 9), ("met", 6), *_columns("TTFT p50", 10, 8), *_columns("TPOT p50", 10, 7))
    speed = [_header("", width, names)]
    names = (
        ("preempted", 10),
        ("rejected", 9),
        ("KV used", 9),
        ("wasted", 8),
        ("prefix", 8),
        ("$/M tok", 9),
        ("watts", 7),
    )
    memory = [_header("", width, names)]
    for row in rows:
        result, usd = row.result, row.usd_per_million_tokens
        speed.append(
            f"{row.name:{width}}{result.output_tokens_per_s:8,.0f}{row.goodput:9.2f}{row.good_part:6.0%}"
            f"{_three(result.ttft, (10, 8, 8))}{_three(result.tpot, (10, 7, 7))}"
        )
        memory.append(
            f"{row.name:{width}}{result.num_preemptions:10,}{result.num_rejected + result.num_refused:9,}"
            f"{result.mean_kv_use:9.1%}{result.kv_waste:8.1%}{result.prefix_hit_rate:8.1%}"
            f"{'-' if usd is None else f'{usd:.2f}':>9}{row.watts:7,.0f}"
        )
    return "\n".join([*speed, "", *memory, "", "goodput in requests/s, times in ms; KV wasted: held and empty"])


def sweep_table(points: Sequence[Point]) -> str:
    """A row a point; a star where no other point has both more throughput and a smaller p99 of the gaps."""
    best = front(points)
    names = (
        ("sequences", 11),
        ("tok/s", 9),
        ("goodput", 9),
        ("ITL p50", 9),
        ("p99, ms", 9),
        ("TTFT p50", 10),
        ("p99, ms", 10),
    )
    lines = [_header(f"{'budget':>8}", 8, names)]
    for point in points:
        itl, ttft = point.result.itl, point.result.ttft
        lines.append(
            f"{point.budget:8,}{point.num_seqs:11,}{point.tokens_per_s:9,.0f}{point.goodput:9.2f}"
            f"{_ms(itl.p50 if itl else None, 9)}{_ms(itl.p99 if itl else None, 9)}"
            f"{_ms(ttft.p50 if ttft else None, 10)}{_ms(ttft.p99 if ttft else None, 10)}{' *' if point in best else ''}"
        )
    return "\n".join([*lines, "", "* nothing else has both more tok/s and a smaller ITL p99"])


def preset_list() -> str:
    """Each preset with its source and what is modelled."""
    lines = []
    for name, preset in PRESETS.items():
        lines.append(name + ("  (a cluster: compare only)" if preset.pools else ""))
        lines += textwrap.wrap(preset.models, 96, initial_indent="    ", subsequent_indent="    ")
        lines += textwrap.wrap(preset.source, 96, initial_indent="    source: ", subsequent_indent="    ")
    return "\n".join(lines)


def _header(first: str, width: int, names: Sequence[tuple[str, int]]) -> str:
    return f"{first:{width}}" + "".join(f"{name:>{size}}" for name, size in names)


def _columns(first: str, first_width: int, width: int) -> tuple[tuple[str, int], ...]:
    return (first, first_width), ("p95", width), ("p99", width)


def _three(times: Distribution | None, widths: tuple[int, int, int]) -> str:
    values = (None, None, None) if times is None else (times.p50, times.p95, times.p99)
    return "".join(_ms(value, width) for value, width in zip(values, widths, strict=True))


def _ms(seconds: float | None, width: int) -> str:
    return f"{'-':>{width}}" if seconds is None else f"{seconds * 1e3:{width},.{0 if seconds >= 0.1 else 1}f}"


def _number(value: float) -> str:
    """Ten characters, with decimals where they fit, and never against the column before."""
    return f"{value:10,.2f}" if value < 99_999.5 else f" {value:9,.0f}"


def _times(name: str, times: Distribution | None, scale: float) -> str:
    values = ("-",) * 5 if times is None else (times.mean, times.p50, times.p95, times.p99, times.max)
    return f"{name:11}" + "".join(
        f"{value:>10}" if isinstance(value, str) else _number(value * scale) for value in values
    )
