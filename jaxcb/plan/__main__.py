"""``python -m jaxcb.plan``: see jaxcb/plan/cli.py for its commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from jaxcb.config import EngineConfig
from jaxcb.errors import JaxcbError
from jaxcb.plan import formulas, report
from jaxcb.plan.capacity import Capacity, Workload
from jaxcb.plan.cli import parse
from jaxcb.plan.models import find_model
from jaxcb.plan.prefix_curve import prefix_curve
from jaxcb.plan.shapes import shapes_of
from jaxcb.sim.gpus import GPUS
from jaxcb.sim.trace import WORKLOADS

_LIMITS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "gpu_memory_utilization",
    "tensor_parallel_size",
)


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status. Whatever can't work is one line on stderr and status 1."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        _COMMANDS[options.command](options)
    except JaxcbError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _capacity(options: argparse.Namespace) -> None:
    capacity = Capacity(find_model(options.model), GPUS[options.gpu], _config(options))
    workload = _workload(options)
    context = round(workload.prompt + workload.output)
    lines = [
        *report.memory_lines(capacity, workload),
        *report.swap_lines(capacity, context),
        *report.batch_table(capacity, workload),
    ]
    if options.rate is not None or options.itl_ms is not None:
        lines.append("")
    batch = capacity.most_at_once(workload)
    if options.rate is not None:
        lines += report.rate_lines(capacity, workload, options.rate)
        batch = max(min(round(capacity.at_rate(options.rate, workload).batch), batch), 1)
    if options.itl_ms is not None:
        lines += report.limit_lines(capacity, workload, options.itl_ms / 1e3, batch)
    if options.lengths is not None:
        lines += ["", *report.static_lines(options.lengths)]
    print("\n".join(lines))


def _shapes(options: argparse.Namespace) -> None:
    model, gpu, workload = find_model(options.model), GPUS[options.gpu], _workload(options)
    shapes = shapes_of(model, gpu, options.num_gpus, workload, _config(options))
    print(
        f"{model.name} in bfloat16 on {options.num_gpus} x {gpu.name}, requests of {workload.prompt:,.0f} + "
        f"{workload.output:,.0f} tokens\n"
    )
    print("\n".join(report.shape_table(shapes, workload, options.rate)))


def _config(options: argparse.Namespace) -> EngineConfig:
    given = {name: getattr(options, name, None) for name in _LIMITS}
    return EngineConfig(**{name: value for name, value in given.items() if value is not None})


def _workload(options: argparse.Namespace) -> Workload:
    typical = WORKLOADS[options.workload]
    return Workload(options.prompt or typical.prompt.mean, options.output or typical.output.mean)


def _static(options: argparse.Namespace) -> None:
    print("\n".join(report.static_lines(options.lengths)))


def _requests(options: argparse.Namespace) -> None:
    count = formulas.max_concurrent(
        memory_bytes=options.memory_gb * 1e9,
        weight_bytes=options.weights_gb * 1e9,
        kv_bytes_per_token=options.kv_kb * 1e3,
        context=options.context,
    )
    free, each = options.memory_gb - options.weights_gb, options.kv_kb * options.context / 1e6
    print(f"{count:,} requests: {free:g} GB for KV, {each:.3f} GB a request of {options.context:,} tokens")


def _chunk(options: argparse.Namespace) -> None:
    itl_s, ttft_s = options.itl_ms / 1e3, options.ttft_ms / 1e3
    chunk = formulas.largest_chunk(itl_s=itl_s, decode_s=1 / options.decode, prefill_tokens_per_s=options.prefill)
    between, within = (
        formulas.longest_prompt(ttft_s=ttft_s, itl_s=itl_s, chunk=chunk, waits=waits) for waits in (False, True)
    )
    print(
        f"a chunk of at most {chunk:,} tokens: ({options.itl_ms:g} - {1e3 / options.decode:g}) ms at "
        f"{options.prefill:g} tokens/s\n"
        f"the longest prompt that {options.ttft_ms:g} ms can promise has {within:,} tokens, one that comes between two "
        f"steps {between:,}\n"
        "policy: decodes first in every step, then one chunk, first come first served; refuse or delay longer prompts"
    )


def _swap(options: argparse.Namespace) -> None:
    seconds = formulas.swap_s(
        num_tokens=options.tokens, kv_bytes_per_token=options.kv_kb * 1e3, link_bandwidth=options.link_gbs * 1e9
    )
    print(
        f"{seconds * 1e3:.1f} ms one way: {options.tokens:,} tokens of {options.kv_kb:g} KB are "
        f"{options.tokens * options.kv_kb / 1e6:.3f} GB, at {options.link_gbs:g} GB/s"
    )


def _prefix(options: argparse.Namespace) -> None:
    capacity = Capacity(find_model(options.model), GPUS[options.gpu])
    lengths = {name: getattr(options, name) for name in ("prefix", "suffix", "output")}
    until = formulas.superlinear_until(prefix=options.prefix, suffix=options.suffix)
    print(
        f"{options.prefix:,} shared + {options.suffix:,} own + {options.output:,} output tokens, "
        f"{capacity.model.name} on one {capacity.gpu.name}\n"
        "speedup(k) = k ((P + U) c + O d(1)) / (k U c + O d(k)): more than k below 1 + P / U = "
        f"{until:.1f} while d(k) = d(1)\n\n{'users':>6}{'formula':>10}{'simulated':>11}{'a user':>9}"
    )
    for point in prefix_curve(capacity, **lengths, users=options.users):
        print(
            f"{point.num_users:6}{point.formula:10.2f}{point.simulated:11.2f}{point.simulated / point.num_users:9.2f}",
            flush=True,
        )


_COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "capacity": _capacity,
    "shapes": _shapes,
    "static": _static,
    "requests": _requests,
    "chunk": _chunk,
    "swap": _swap,
    "prefix": _prefix,
}


if __name__ == "__main__":
    sys.exit(main())
