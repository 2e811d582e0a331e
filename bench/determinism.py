"""What ``deterministic=True`` costs: every compiled shape, full, with it and without, round by round in turn.

Rows are filled as by ``python -m bench.buckets``. The step is timed with greedy rows, and with rows at temperature 1,
whose sampler works in tiles too. "times" is the median over the rounds of the ratio within a round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

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
from jaxcb.request import SamplingParams
from jaxcb.scheduler import PlanRow, StepPlan

SAMPLED = SamplingParams(temperature=1.0, seed=1, ignore_eos=True)


def main(argv: Sequence[str] | None = None) -> Result:
    """The command line."""
    parser = make_parser("determinism", __doc__, seed=0, seed_help="not used: rows are zeros")
    add_engine_options(parser)
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="default 5")
    parser.add_argument("--steps", type=positive, default=5, metavar="N", help="of each round; default 5")
    parser.add_argument("--context", type=positive, default=256, metavar="N", help="tokens; default 256")
    args = parser.parse_args(argv)

    config = engine_config(args, enable_prefix_caching=False)
    both = [InProcess.load(dataclasses.replace(config, deterministic=choice)) for choice in (False, True)]
    plans = {bucket: full_plan(bucket, both[0].runner.shape, args.context) for bucket in both[0].runner.buckets}
    rows = [
        {"bucket": str(bucket)}
        | _compared("greedy", both, plan, args.rounds, args.steps)
        | _compared("sampled", both, _sampled(plan), args.rounds, args.steps)
        for bucket, plan in tqdm(plans.items(), desc="timing", unit="bucket", disable=not show_progress())
    ]
    result = {"bench": "determinism", "machine": both[0].facts, "context": args.context, "rows": rows}
    _print(result)
    save(args.json, result)
    return result


def _sampled(plan: StepPlan) -> StepPlan:
    """The same step at temperature 1."""
    sequence = plan.rows[0].sequence
    request = dataclasses.replace(sequence.request, sampling=SAMPLED)
    hot = dataclasses.replace(sequence, request=request)
    rows = [dataclasses.replace(row, sequence=hot) for row in plan.rows if isinstance(row, PlanRow)]
    return StepPlan.of(rows, len(plan.decoding))


def _compared(
    name: str, both: Sequence[InProcess], plan: StepPlan, num_rounds: int, num_steps: int
) -> dict[str, object]:
    """Milliseconds a step without and with determinism, and the ratio."""
    medians: tuple[list[float], list[float]] = ([], [])
    for _ in range(num_rounds):
        for process, seconds in zip(both, medians, strict=True):
            timed = time_steps(process.runner, plan, num_steps, run_ahead=process.config.run_ahead)
            seconds.append(percentile(timed, 50) * 1e3)
    plain, fixed = medians
    return {
        name: {
            "ms": percentile(plain, 50),
            "deterministic_ms": percentile(fixed, 50),
            "times": paired_ratio(fixed, plain),
        }
    }


def _print(result: Result) -> None:
    lines = []
    for row in result["rows"]:
        cells = [row["bucket"]]
        for name in ("greedy", "sampled"):
            cells += [f"{row[name]['ms']:.1f}", f"{row[name]['deterministic_ms']:.1f}", f"{row[name]['times']:.2f}"]
        lines.append(cells)
    print(f"machine: {describe(result['machine'])}")
    print(f"full steps at context {result['context']}; greedy, then temperature 1")
    print(markdown_table(["bucket", "ms", "deterministic", "times", "sampled ms", "deterministic", "times"], lines))


if __name__ == "__main__":
    raise SystemExit(run(main))
