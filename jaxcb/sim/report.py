"""What the commands print: plain text of at most 100 columns."""

from __future__ import annotations

from jaxcb.scheduler import SchedulerLimits
from jaxcb.sim.reference import Totals
from jaxcb.sim.result import Distribution, Result

COMPARISON_HEADER = f"{'':30}{'tok/s':>8}{'seconds':>10}{'steps':>8}{'tokens':>12}{'preempted':>11}"


def comparison_row(name: str, totals: Totals) -> str:
    """A row of the reference table, under ``COMPARISON_HEADER``."""
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


def _times(name: str, times: Distribution | None, scale: float) -> str:
    values = ("-",) * 5 if times is None else (times.mean, times.p50, times.p95, times.p99, times.max)
    return f"{name:11}" + "".join(
        f"{value:>10}" if isinstance(value, str) else f"{value * scale:10,.2f}" for value in values
    )
