"""What ``python -m jaxcb.plan`` prints: plain text of at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from jaxcb.errors import ConfigError
from jaxcb.plan.capacity import Capacity, Workload
from jaxcb.plan.formulas import static_utilization
from jaxcb.plan.shapes import Shape
from jaxcb.sim.step_time import BFLOAT16_BYTES


def memory_lines(capacity: Capacity, workload: Workload) -> list[str]:
    """Weights, KV, and how many requests they leave room for."""
    model, limits = capacity.model, capacity.limits
    full = workload.prompt + workload.output
    cards, each = ("one", "") if capacity.num_gpus == 1 else (f"{capacity.num_gpus} x", " on each")
    return [
        f"{model.name} in bfloat16 on {cards} {capacity.gpu.name}, requests of {workload.prompt:,.0f} + "
        f"{workload.output:,.0f} tokens",
        "",
        f"weights        {_weights_gb(capacity):.1f} GB of {capacity.gpu.memory_bytes / 1e9:.0f} GB{each}",
        f"KV cache       {capacity.kv_bytes_per_token / 1e3:.1f} KB a token{each}; {limits.num_kv_pages:,} pages of "
        f"{limits.page_size} hold {capacity.num_kv_tokens:,} tokens",
        f"at once        {capacity.most_requests(workload.mean_context):,} requests at their mean context of "
        f"{workload.mean_context:,.0f} tokens, {capacity.most_requests(full):,} if all were at their end",
    ]


def shape_table(shapes: Mapping[str, Shape | ConfigError], workload: Workload, rate: float | None) -> list[str]:
    """A line for each shape, with its times where a rate is given; below them, why some don't work."""
    times = "" if rate is None else f"{'ITL':>9}{'longest':>9}{'TTFT':>9}"
    units = "" if rate is None else f"{f'ms at {rate:g} req/s':>27}"
    lines = [
        f"{'':32}{'weights':>11}{'KV tokens':>12}{'requests/s':>12}{times}",
        f"{'':32}{'GB a card':>11}{'':12}{'at most':>12}{units}",
    ]
    reasons: dict[str, list[str]] = {}
    for name, shape in shapes.items():
        if isinstance(shape, ConfigError):
            reasons.setdefault(str(shape), []).append(name)
            continue
        most = shape.most_requests_per_s(workload)
        line = f"{name:32}{_weights_gb(shape.engine):11.1f}{shape.num_kv_tokens:12,}{most:12.2f}"
        if rate is not None and rate < most:
            point = shape.at_rate(rate, workload)
            line += "".join(f"{s * 1e3:9.1f}" for s in (point.itl_s, point.longest_gap_s, point.ttft_s))
        elif rate is not None:
            line += f"{'the queue grows':>27}"
        lines.append(line)
    for reason, names in reasons.items():
        lines += ["", *textwrap.wrap(f"{', '.join(names)}: {reason}", 100)]
    return lines


def _weights_gb(capacity: Capacity) -> float:
    """On one card."""
    return capacity.part.num_params * BFLOAT16_BYTES / 1e9


def batch_table(capacity: Capacity, workload: Workload) -> list[str]:
    """Throughput by batch size; the knee is where computing takes as long as reading the weights."""
    knee = capacity.step_time.knee_tokens
    lines = [
        f"roofline knee  {knee:,.0f} tokens a step: below it a step takes as long as reading the weights",
        "",
        f"{'batch':>7}{'ms a step':>12}{'decode tok/s':>14}{'with prompts':>14}{'requests/s':>12}",
    ]
    most = capacity.most_at_once(workload)
    sizes = sorted({*(2**i for i in range(13) if 2**i < most), most})
    passed = False
    for size in sizes:
        point = capacity.at_batch(size, workload)
        mark = ""
        if not passed and size * (1 + workload.prompt / workload.output) >= knee:
            passed, mark = True, "  <- with its prompts past the knee"
        lines.append(
            f"{size:7,}{point.step_s * 1e3:12.2f}{point.decode_tokens_per_s:14,.0f}{point.tokens_per_s:14,.0f}"
            f"{point.requests_per_s:12.2f}{mark}"
        )
    return lines


def rate_lines(capacity: Capacity, workload: Workload, rate: float) -> list[str]:
    """Times at a rate of arrivals."""
    point = capacity.at_rate(rate, workload)
    lines = [
        f"{f'at {rate:g} req/s':15}{point.utilization:.0%} of the most that is possible "
        f"({capacity.most_requests_per_s(workload):.2f} req/s)"
    ]
    if point.utilization >= 1:
        return [*lines, "               the queue grows without end: take a faster card, more of them, or a lower rate"]
    return [
        *lines,
        f"               {point.batch:,.1f} requests decode at a time, ITL {point.itl_s * 1e3:.1f} ms, TTFT "
        f"{point.ttft_s * 1e3:.0f} ms (arrivals without bursts)",
    ]


def limit_lines(capacity: Capacity, workload: Workload, itl_s: float, batch: int) -> list[str]:
    """The largest token budget under an ITL limit."""
    budget = capacity.largest_budget(itl_s, batch, workload.mean_context)
    return [
        f"{f'ITL {itl_s * 1e3:g} ms':15}holds up to --max-num-batched-tokens {budget} with {batch:,} decodes at their "
        "mean context"
    ]


def swap_lines(capacity: Capacity, num_tokens: int) -> list[str]:
    """What preempting a sequence costs, both ways."""
    swap, recompute = capacity.swap_s(num_tokens) * 1e3, capacity.recompute_s(num_tokens) * 1e3
    cheaper = "swap" if 2 * swap < recompute else "recompute"
    return [
        f"preempting     {num_tokens:,} tokens: swap {swap:.1f} ms out and {swap:.1f} ms back over "
        f"{capacity.gpu.host_bandwidth / 1e9:.0f} GB/s, recompute {recompute:.1f} ms: {cheaper}"
    ]


def static_lines(lengths: list[int]) -> list[str]:
    """Static against continuous batching of a list of lengths."""
    share = static_utilization(lengths)
    return [
        f"static batching: {sum(lengths):,} tokens in {len(lengths)} x {max(lengths):,} slot-steps, utilization "
        f"{share:.1%}",
        f"continuous batching: 100% while requests wait, {1 / share:.2f} times as much",
    ]
