"""Which sizes to compile: what part of the computed tokens is padding, for lists of buckets, on ShareGPT-like requests.

The scheduler runs under the simulator's clock, with few, half as many as fit, and more users than fit; each user sends
the next request when he has his answer. Every step's plan is then charged to each list of buckets. The last rows trim
chunks to compiled sizes (``exact_fill``), which changes the plans.

On GPUs, and under XLA on a CPU, a padded token costs as much as another; the native CPU kernels skip it.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from tqdm import tqdm

from bench.common import Result, describe, machine, make_parser, markdown_table, positive, run, save, show_progress
from jaxcb.config import EngineConfig
from jaxcb.scheduler import SchedulerLimits, StepPlan
from jaxcb.sim import GPUS, MODELS, StepTimeModel, limits_on, make_trace, one_engine
from jaxcb.sim.simulator import run as run_simulation
from jaxcb.sim.trace import closed_loop
from jaxcb.sizing import CPU_DECODE_BUCKETS, CPU_MIXED_BUCKETS, GPU_DECODE_BUCKETS, GPU_MIXED_BUCKETS

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
USERS = {"few": 1 / 8, "half": 1 / 2, "more": 2.0}
"""Of the sequences that one step holds."""


class Platform(NamedTuple):
    name: str
    limits: SchedulerLimits
    step_time: StepTimeModel
    default: tuple[tuple[int, ...], tuple[int, ...]]
    """Decode and mixed sizes that an engine takes."""


class Step(NamedTuple):
    num_tokens: int
    decode_only: bool


class Buckets(NamedTuple):
    """Sizes of steps that only decode, and of others; the largest ones are there in any case."""

    name: str
    decode: tuple[int, ...]
    mixed: tuple[int, ...]

    def within(self, limits: SchedulerLimits) -> Buckets:
        return Buckets(self.name, _up_to(self.decode, limits.max_num_seqs), _up_to(self.mixed, limits.step_sizes[-1]))

    @property
    def num_programs(self) -> int:
        return len(self.decode) + len(self.mixed)

    def wasted(self, steps: Sequence[Step]) -> float:
        """Part of the computed tokens that is padding."""
        asked = sum(step.num_tokens for step in steps)
        computed = sum(_rounded(step.num_tokens, self.decode if step.decode_only else self.mixed) for step in steps)
        return 1 - asked / computed


def platforms() -> list[Platform]:
    """Llama 3.1 8B on an H100, and SmolLM2 135M on two cores (110 GFLOP/s, 15 GB/s)."""
    config = EngineConfig(max_model_len=8192)
    large, small = MODELS["8b"], MODELS["135m"]
    on_gpu = limits_on(GPUS["h100"], large, config)
    cores = dataclasses.replace(
        StepTimeModel.of(small, GPUS["h100"], overhead_s=2e-3),
        bandwidth=15e9,
        kv_bandwidth=10e9,
        flops=110e9,
        attention_flops=50e9,
    )
    on_cpu = dataclasses.replace(
        on_gpu, max_num_seqs=32, num_slots=64, max_num_batched_tokens=512, step_sizes=(64, 128, 256, 512)
    )
    return [
        Platform("GPU", on_gpu, StepTimeModel.of(large, GPUS["h100"]), (GPU_DECODE_BUCKETS, GPU_MIXED_BUCKETS)),
        Platform("CPU", on_cpu, cores, (CPU_DECODE_BUCKETS, CPU_MIXED_BUCKETS)),
    ]


def candidates(platform: Platform) -> list[Buckets]:
    """Lists to compare; the first is the default."""
    steps_of_half = tuple(sorted({size + size // 2 * half for size in SIZES for half in (0, 1)}))
    lists = [
        Buckets("default", *platform.default),
        Buckets("one each", (), ()),
        Buckets("powers of 4", SIZES[::2], SIZES[::2]),
        Buckets("powers of 2", SIZES, SIZES[5:]),
        Buckets("powers of 2, halves between", steps_of_half, tuple(size for size in steps_of_half if size >= 32)),
    ]
    return [buckets.within(platform.limits) for buckets in lists]


def steps_of(platform: Platform, num_users: int, num_requests: int, seed: int, *, exact_fill: bool) -> list[Step]:
    """What the scheduler plans for so many users."""
    steps: list[Step] = []

    def note(plan: StepPlan, start_s: float, step_s: float) -> None:
        steps.append(Step(plan.num_tokens, plan.decode_only))

    limits = dataclasses.replace(platform.limits, exact_fill=exact_fill)
    trace = closed_loop(make_trace("sharegpt", num_requests, seed=seed), num_users)
    run_simulation(one_engine(limits, trace, platform.step_time, on_plan=note))
    return steps


def measure(platform: Platform, *, num_requests: int, seed: int, progress: bool) -> list[dict[str, object]]:
    """A row a list of buckets: programs, and the part that is padding by number of users."""
    lists = candidates(platform)
    runs: dict[bool, dict[str, list[Step]]] = {False: {}, True: {}}
    with tqdm(total=2 * len(USERS), desc=platform.name, unit="run", disable=not progress) as bar:
        for exact_fill, by_users in runs.items():
            limits = dataclasses.replace(platform.limits, step_sizes=lists[0].mixed)
            for name, part in USERS.items():
                users = max(1, int(part * limits.max_num_seqs))
                by_users[name] = steps_of(
                    platform._replace(limits=limits), users, num_requests, seed, exact_fill=exact_fill
                )
                bar.update()
    rows = [(buckets, runs[False]) for buckets in lists]
    rows.append((lists[0]._replace(name="default, exact_fill"), runs[True]))
    return [
        {
            "platform": platform.name,
            "buckets": buckets.name,
            "decode": buckets.decode,
            "mixed": buckets.mixed,
            "programs": buckets.num_programs,
            "wasted": {name: buckets.wasted(steps) for name, steps in by_users.items()},
            "steps": {name: len(steps) for name, steps in by_users.items()},
        }
        for buckets, by_users in rows
    ]


def main(argv: Sequence[str] | None = None) -> Result:
    """The command line."""
    parser = make_parser("padding", __doc__, seed=1, seed_help="of lengths")
    parser.add_argument("--num-requests", type=positive, default=1000, metavar="N", help="of each run; default 1000")
    args = parser.parse_args(argv)
    facts = machine()
    rows = [
        row
        for platform in platforms()
        for row in measure(platform, num_requests=args.num_requests, seed=args.seed, progress=show_progress())
    ]
    print(f"machine: {describe(facts)}")
    print(_table(rows))
    result = {"bench": "padding", "machine": facts, "seed": args.seed, "num_requests": args.num_requests, "rows": rows}
    save(args.json, result)
    return result


def _table(rows: Sequence[dict[str, object]]) -> str:
    headers = ["buckets", "decode", "mixed", "programs", *(f"{name} users: wasted" for name in USERS)]
    return markdown_table(
        headers,
        [
            [
                f"{row['platform']}: {row['buckets']}",
                " ".join(map(str, row["decode"])),  # type: ignore[call-overload]  # a tuple
                " ".join(map(str, row["mixed"])),  # type: ignore[call-overload]
                row["programs"],
                *(f"{part:.1%}" for part in row["wasted"].values()),  # type: ignore[attr-defined]  # a dict
            ]
            for row in rows
        ],
    )


def _up_to(sizes: tuple[int, ...], largest: int) -> tuple[int, ...]:
    return (*sorted(size for size in sizes if size < largest), largest)


def _rounded(num_tokens: int, sizes: tuple[int, ...]) -> int:
    return sizes[bisect_left(sizes, num_tokens)]


if __name__ == "__main__":
    raise SystemExit(run(main))
