"""What a step costs the host: CPU time of the engine's thread, while the device works on the step before.

For each number of running sequences, all of them decode, and the times of plan, launch (pack, upload, dispatch of the
forward and of the sampler) and commit are summed up over a step. The thread's CPU time is counted, so that waiting for
the device, and other work on the machine, are left out; the text and HTTP threads are not.

On a CPU the device works on the same cores, and what the host then finds in their caches is the device's: --small runs
a random model of two small layers, whose steps leave the host's code and data there, as a GPU does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from tqdm import tqdm

from bench.common import (
    Result,
    Spread,
    describe,
    make_parser,
    markdown_table,
    positive,
    run,
    save,
    show_progress,
)
from bench.inprocess import InProcess, add_engine_options, engine_config, exact_length
from bench.models import spec_of
from bench.workload import Item
from jaxcb.config import EngineConfig
from jaxcb.engine import Engine
from jaxcb.engine.core import EngineCore
from jaxcb.models.decoder import init_params
from jaxcb.scheduler import Scheduler
from jaxcb.weights.held import no_tokenizer

PARTS = ("plan", "launch", "commit")
NUM_RUNNING = (1, 64, 256)
PROMPT_LEN = 4
_WARM_UP_STEPS = 3


def measure(process: InProcess, num_running: int, num_steps: int) -> dict[str, list[float]]:
    """Seconds of each part of a step, by step, with ``num_running`` sequences that decode."""
    scheduler = Scheduler(process.limits)
    core = EngineCore(scheduler, process.runner, run_ahead=process.config.run_ahead)
    spent: dict[str, list[float]] = {name: [] for name in PARTS}
    for target, name, part in (
        (scheduler, "plan", "plan"),
        (scheduler, "commit", "commit"),
        (process.runner, "launch", "launch"),
    ):
        setattr(target, name, _timed(getattr(type(target), name).__get__(target), spent[part]))
    length = num_steps + 2 * _WARM_UP_STEPS + num_running * PROMPT_LEN // process.limits.max_num_batched_tokens
    for number in range(num_running):
        core.add(exact_length(str(number), Item([number % 100 + 1] * PROMPT_LEN, length)))
    try:
        while scheduler.num_running < num_running or scheduler.num_waiting:
            core.step()
        for _ in range(_WARM_UP_STEPS):
            core.step()
        for times in spent.values():
            times.clear()
        for _ in range(num_steps):
            core.step()
        return {name: list(times) for name, times in spent.items()}
    finally:
        del process.runner.launch  # the timed one
        while core.has_work:
            core.step()


def small_model(config: EngineConfig) -> InProcess:
    """Compiled; its vocabulary has 512 ids."""
    spec = spec_of("llama-3.1-8b", small=True)
    engine = Engine("small", spec, init_params(spec, jnp.bfloat16, 0), no_tokenizer(spec), config)
    engine.compile(progress=show_progress())
    return InProcess.over(engine)


def main(argv: Sequence[str] | None = None) -> Result:
    """The command line."""
    parser = make_parser("host_time", __doc__, seed=None, seed_help="of nothing: the prompts are made up")
    add_engine_options(parser, max_num_seqs=256, max_model_len=512)
    parser.add_argument("--steps", type=positive, default=30, metavar="N", help="counted for each row; default 30")
    parser.add_argument("--small", action="store_true", help="a small random model in place of --model")
    args = parser.parse_args(argv)
    config = engine_config(args, enable_prefix_caching=True)
    process = small_model(config) if args.small else InProcess.load(config)
    counts = [count for count in NUM_RUNNING if count <= process.limits.max_num_seqs]
    rows = []
    for count in tqdm(counts, desc="running", disable=not show_progress()):
        spent = measure(process, count, args.steps)
        whole = Spread.of(sum(times) * 1e6 for times in zip(*spent.values(), strict=True))
        parts = {name: Spread.of(second * 1e6 for second in times).median for name, times in spent.items()}
        rows.append({"running": count, **{f"{name}_us": us for name, us in parts.items()}, "us": whole._asdict()})
    print(f"machine: {describe(process.facts)}")
    table = [
        [row["running"], *(f"{row[f'{part}_us']:.0f}" for part in PARTS), *(f"{us:.0f}" for us in row["us"].values())]
        for row in rows
    ]
    print(markdown_table(["running", *(f"{part} us" for part in PARTS), "all us (median)", "p10", "p90"], table))
    result = {"bench": "host_time", "machine": process.facts, "steps": args.steps, "rows": rows}
    save(args.json, result)
    return result


def _timed(function: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    """The function, which adds the CPU time of each call to ``times``."""

    def call(*args: Any) -> Any:
        begun_s = time.thread_time()
        result = function(*args)
        times.append(time.thread_time() - begun_s)
        return result

    return call


if __name__ == "__main__":
    raise SystemExit(run(main))
