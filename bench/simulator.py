"""How fast the simulator is: simulated tokens a second on one core at 256 running sequences, and a day of requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.common import Result, describe, machine, make_parser, markdown_table, positive, run, save, show_progress
from jaxcb.config import EngineConfig
from jaxcb.sim import GPUS, MODELS, Simulation, StepTimeModel, TraceRequest, limits_on, make_trace, one_engine
from jaxcb.sim.commands import drive
from jaxcb.sim.trace import closed_loop

NUM_RUNNING = 256
DAY_S = 86_400.0
DAY_REQUESTS = 100_000


class Speed(NamedTuple):
    """A simulated run."""

    name: str
    running: float
    """Sequences a step, on average."""
    steps: int
    output_tokens: int
    step_tokens: int
    """Prompt tokens included."""
    cpu_s: float


def measure(name: str, simulation: Simulation) -> Speed:
    """Run it to its end, timed in CPU time of this process."""
    started_s = time.process_time()
    drive(name, simulation, progress=show_progress())
    cpu_s = time.process_time() - started_s
    result = simulation.result()
    return Speed(name, result.mean_running, result.num_steps, result.num_output_tokens, result.num_step_tokens, cpu_s)


def engine(trace: Sequence[TraceRequest], **settings: object) -> Simulation:
    """The 8B model on one H100, 256 sequences."""
    model, gpu = MODELS["8b"], GPUS["h100"]
    config = EngineConfig(max_num_seqs=NUM_RUNNING, max_model_len=16_384, **settings)  # type: ignore[arg-type]  # its fields
    return one_engine(limits_on(gpu, model, config), trace, StepTimeModel.of(model, gpu))


def long_answers(seed: int, num_requests: int) -> Simulation:
    """All decode all the time: prompts of 100 tokens, answers of 1,000."""
    del seed
    return engine([TraceRequest(0.0, 100, 1000)] * num_requests, enable_prefix_caching=False)


def mixed(seed: int, num_requests: int) -> Simulation:
    """Prompts of 50 to 999 tokens, answers of 10 to 999, from as many users as there are places; prefix caching on."""
    return engine(closed_loop(make_trace("uniform", 3 * num_requests, seed=seed), NUM_RUNNING))


def day(seed: int, num_requests: int) -> Simulation:
    """ShareGPT-like requests as they come in a day with ``DAY_REQUESTS`` of them."""
    return engine(make_trace("sharegpt", num_requests, rate=DAY_REQUESTS / DAY_S, seed=seed))


RUNS: dict[str, Callable[[int, int], Simulation]] = {"long answers": long_answers, "mixed": mixed}


def main(argv: Sequence[str] | None = None) -> Result:
    """The command line."""
    parser = make_parser("simulator", __doc__, seed=1, seed_help="of lengths and arrivals")
    parser.add_argument(
        "--num-requests", type=positive, default=512, metavar="N", help="of the first runs; default 512"
    )
    parser.add_argument("--day", action="store_true", help="also a day of 100,000 requests, which takes minutes")
    args = parser.parse_args(argv)
    facts = machine()
    print(f"machine: {describe(facts)}\n", flush=True)
    speeds = [measure(name, make(args.seed, args.num_requests)) for name, make in RUNS.items()]
    if args.day:
        speeds.append(measure("a day", day(args.seed, DAY_REQUESTS)))
    print(
        markdown_table(
            ("run", "running", "output tok/s", "all tok/s", "us a step", "CPU s"),
            [
                (
                    speed.name,
                    f"{speed.running:.0f}",
                    f"{speed.output_tokens / speed.cpu_s:,.0f}",
                    f"{speed.step_tokens / speed.cpu_s:,.0f}",
                    f"{speed.cpu_s / speed.steps * 1e6:,.0f}",
                    f"{speed.cpu_s:,.1f}",
                )
                for speed in speeds
            ],
        )
    )
    result = {"bench": "simulator", "machine": facts, "seed": args.seed, "runs": [speed._asdict() for speed in speeds]}
    save(args.json if isinstance(args.json, Path) else None, result)
    return result


if __name__ == "__main__":
    raise SystemExit(run(main))
