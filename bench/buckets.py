"""The speed of every compiled shape of a real engine, full, and how much of the shapes is padding in use.

A decode bucket runs with all its rows at --context tokens. A mixed bucket runs with half of the rows decoding there
and prompts of --context tokens in the rest. Steps follow each other as in the engine: step k + 1 is launched before
step k has ended.

"MB" and "GFLOP" are what a step must read and compute, "roofline ms" the least time for that at the speeds of memory
and cores that were measured here (bench/roofline.py), "of it" that time's share of the median's.

--replay also runs the workload through the scheduler and, in turn with that, launches the very same steps back to back
with no scheduler: the ratio is what planning, committing and their gaps cost.

"Padding above" is the share of padding in the worst step that still runs in the bucket: the one that is a token too
large for the bucket before. The last columns count steps and padding of a workload run through the scheduler, all
requests at once.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
from tqdm import tqdm

from bench.common import (
    Result,
    Spread,
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
from bench.full_step import full_plan, repeated
from bench.inprocess import InProcess, LaunchedStep, add_engine_options, engine_config, exact_length
from bench.pictures import add_plot_option, bars, picture
from bench.roofline import Speeds, Work
from bench.workload import SEED, Workload, make, read
from jaxcb.scheduler import StepPlan
from jaxcb.step.buckets import Bucket
from jaxcb.step.runner import InFlight, Runner

_WARM_UP_STEPS = 3


class Use(NamedTuple):
    """What a workload did with one bucket."""

    num_steps: int
    num_tokens: int
    num_padding: int

    @property
    def padding(self) -> float:
        """Share of the computed token rows that nobody asked for."""
        computed = self.num_tokens + self.num_padding
        return self.num_padding / computed if computed else 0.0


def time_steps(runner: Runner, plan: StepPlan, num_steps: int, *, run_ahead: bool) -> list[float]:
    """Seconds from the end of each step to the end of the next, after a few to warm up."""
    runner.launch(plan).wait()
    plan = repeated(plan)
    ends_s: list[float] = []
    in_flight = [runner.launch(plan)]
    while len(ends_s) < _WARM_UP_STEPS + num_steps:
        if run_ahead:
            in_flight.append(runner.launch(plan))
        in_flight.pop(0).wait()
        ends_s.append(time.perf_counter())
        if not run_ahead:
            in_flight.append(runner.launch(plan))
    in_flight.pop(0).wait()
    ends_s = ends_s[_WARM_UP_STEPS - 1 :]
    return [end_s - before_s for before_s, end_s in itertools.pairwise(ends_s)]


def padding_above(bucket: Bucket, before: Bucket | None) -> float:
    """Share of padding in a step that is one token too large for the bucket before; one token if there is none."""
    smallest = before.num_tokens + 1 if before is not None else 1
    return 1 - smallest / bucket.num_tokens


def use_of_buckets(buckets: Sequence[Bucket], steps: Sequence[LaunchedStep]) -> dict[Bucket, Use]:
    """Steps, tokens and padding of each bucket."""
    uses = {}
    for bucket in buckets:
        tokens = [step.num_tokens for step in steps if step.bucket == bucket]
        uses[bucket] = Use(len(tokens), sum(tokens), bucket.num_tokens * len(tokens) - sum(tokens))
    return uses


def replay_in_process(process: InProcess, workload: Workload, *, progress: bool) -> list[LaunchedStep]:
    """Run a workload, all requests at once, and return every step.

    Raises:
        RequestError: a request doesn't fit the engine.
    """
    core, noting = process.new_core()
    for number, item in enumerate(workload.items):
        core.add(exact_length(str(number), item))
    with tqdm(total=workload.num_output_tokens, desc="workload", unit="token", disable=not progress) as bar:
        while core.has_work:
            bar.update(len(core.step()))
    return noting.steps


def replay_ratio(process: InProcess, workload: Workload, num_rounds: int, *, progress: bool) -> dict[str, object]:
    """Wall time of a workload's steps with the scheduler over that of the same steps without, in turns."""
    with_s, without_s, num_steps = [], [], 0
    for _ in tqdm(range(num_rounds), desc="replay", unit="round", disable=not progress):
        core, noting = process.new_core()
        for number, item in enumerate(workload.items):
            core.add(exact_length(str(number), item))
        begun_s = time.perf_counter()
        while core.has_work:
            core.step()
        with_s.append(time.perf_counter() - begun_s)
        without_s.append(_back_to_back(process.runner, noting.plans, run_ahead=process.config.run_ahead))
        num_steps = len(noting.plans)
    return {
        "rounds": num_rounds,
        "steps": num_steps,
        "scheduled_s": percentile(with_s, 50),
        "replayed_s": percentile(without_s, 50),
        "ratio": paired_ratio(with_s, without_s),
    }


def _back_to_back(runner: Runner, plans: Sequence[StepPlan], *, run_ahead: bool) -> float:
    """Seconds of the steps, launched as the engine does, with nothing else between them."""
    begun_s = time.perf_counter()
    in_flight: list[InFlight] = []
    for plan in plans:
        in_flight.append(runner.launch(plan))
        if len(in_flight) > run_ahead:
            in_flight.pop(0).wait()
    for last in in_flight:
        last.wait()
    return time.perf_counter() - begun_s


def main(argv: Sequence[str] | None = None) -> Result:
    """The command line."""
    parser = make_parser("buckets", __doc__, seed=SEED, seed_help="of the workload")
    add_engine_options(parser)
    parser.add_argument("--steps", type=positive, default=20, metavar="N", help="timed for each bucket; default 20")
    parser.add_argument("--context", type=positive, default=256, metavar="N", help="tokens; default 256")
    parser.add_argument("--num-requests", type=positive, default=32, metavar="N", help="of the workload; default 32")
    parser.add_argument("--workload", type=Path, metavar="FILE", help="default: like bench/workload.json, by --seed")
    parser.add_argument("--replay", type=positive, metavar="ROUNDS", help="compare with the same steps, unscheduled")
    add_plot_option(parser, "speed and share of the roofline by bucket")
    args = parser.parse_args(argv)

    process = InProcess.load(engine_config(args, enable_prefix_caching=False))
    config, progress = process.config, show_progress()
    workload = (
        make(process.tokenizer, args.seed, args.num_requests, max_total_tokens=config.max_model_len)
        if args.workload is None
        else read(args.workload)
    )
    buckets = list(process.runner.buckets)
    runner = process.runner
    speeds = Speeds.measure(jnp.dtype(runner.params["embed"]["embedding"].dtype))
    plans = {bucket: full_plan(bucket, runner.shape, args.context) for bucket in buckets}
    kv_bytes_per_token = runner.kv_bytes // (runner.shape.num_pages + 1) // runner.shape.page_size
    work = {bucket: Work.of(plan, runner.spec, runner.params, kv_bytes_per_token) for bucket, plan in plans.items()}
    steps_s = {
        bucket: time_steps(
            process.runner,
            plans[bucket],
            args.steps,
            run_ahead=config.run_ahead,
        )
        for bucket in tqdm(buckets, desc="timing", unit="bucket", disable=not progress)
    }
    uses = use_of_buckets(buckets, replay_in_process(process, workload, progress=progress))
    result = {
        "bench": "buckets",
        "machine": process.facts,
        "context": args.context,
        "steps": args.steps,
        "workload": str(workload),
        "speeds": speeds._asdict(),
        "buckets": _rows(buckets, steps_s, work, speeds, uses),
        "workload_padding": _total(uses).padding,
    }
    if args.replay is not None:
        result["replay"] = replay_ratio(process, workload, args.replay, progress=progress)
    _print(result)
    save(args.json, result)
    if args.plot is not None:
        plot(result["buckets"], args.plot)
    return result


def plot(rows: Sequence[Result], file: Path) -> None:
    """Tokens a second of every bucket, and the share of the roofline that it reaches."""
    steps = [Spread(**row["step_ms"]) for row in rows]
    scales = [row["num_tokens"] * 1e3 for row in rows], [100 * row["roofline_ms"] for row in rows]
    with picture(file, 2, size=(11, 4)) as panels:
        for axes, scale in zip(panels, scales, strict=True):
            middle = [one / step.median for one, step in zip(scale, steps, strict=True)]
            edges = [
                (at - one / step.p90, one / step.p10 - at) for at, one, step in zip(middle, scale, steps, strict=True)
            ]
            bars(axes, [row["bucket"] for row in rows], middle, edges)
        panels[0].set(ylabel="tok/s")
        panels[1].set(ylabel="% of the roofline")


def _rows(
    buckets: Sequence[Bucket],
    steps_s: dict[Bucket, list[float]],
    work: dict[Bucket, Work],
    speeds: Speeds,
    uses: dict[Bucket, Use],
) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    before: dict[bool, Bucket] = {}  # decode buckets come after decode buckets, mixed after mixed
    for bucket in buckets:
        spread = Spread.of(step_s * 1e3 for step_s in steps_s[bucket])
        rows.append(
            {
                "bucket": str(bucket),
                "num_tokens": bucket.num_tokens,
                "num_seqs": bucket.num_seqs,
                "tok_s": bucket.num_tokens / spread.median * 1e3,
                "step_ms": spread._asdict(),
                **work[bucket]._asdict(),
                "roofline_ms": speeds.least_s(work[bucket]) * 1e3,
                "padding_above": padding_above(bucket, before.get(bucket.decode_only)),
                "workload": uses[bucket]._asdict() | {"padding": uses[bucket].padding},
            }
        )
        before[bucket.decode_only] = bucket
    return rows


def _total(uses: dict[Bucket, Use]) -> Use:
    counts = [sum(column) for column in zip(*uses.values(), strict=True)]
    return Use(*counts)


def _print(result: Result) -> None:
    headers = ["bucket", "tok/s", "ms", "p10", "p90", "MB", "GFLOP", "roofline ms", "of it"]
    headers += ["padding above", "steps", "padding"]
    lines = []
    for row in result["buckets"]:
        step_ms, use = row["step_ms"], row["workload"]
        lines.append(
            [
                row["bucket"],
                f"{row['tok_s']:.1f}",
                *(f"{step_ms[name]:.2f}" for name in Spread._fields),
                f"{row['num_bytes'] / 1e6:.0f}",
                f"{row['num_flops'] / 1e9:.2f}",
                f"{row['roofline_ms']:.2f}",
                f"{row['roofline_ms'] / step_ms['median']:.0%}",
                f"{row['padding_above']:.0%}",
                use["num_steps"],
                f"{use['padding']:.1%}" if use["num_steps"] else "-",
            ]
        )
    print(f"machine: {describe(result['machine'])}")
    speeds = result["speeds"]
    print(f"roofline: {speeds['bytes_per_s'] / 1e9:.1f} GB/s, {speeds['flops_per_s'] / 1e9:.0f} GFLOP/s")
    print(f"full steps at context {result['context']}, {result['steps']} timed for each bucket")
    print(markdown_table(headers, lines))
    print(f"workload: {result['workload']}: {result['workload_padding']:.1%} of the computed token rows were padding")
    if "replay" in result:
        replay = result["replay"]
        print(
            f"replay: {replay['steps']} steps take {replay['scheduled_s']:.2f} s with the scheduler, "
            f"{replay['replayed_s']:.2f} s back to back: {replay['ratio']:.3f} times ({replay['rounds']} rounds)"
        )


if __name__ == "__main__":
    raise SystemExit(run(main))
