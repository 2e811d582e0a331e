"""``python -m jaxcb.sim``: the reference experiment, and runs of traces on machines that aren't here."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from typing import Any

from tqdm import tqdm

from jaxcb.errors import JaxcbError
from jaxcb.sim import reference
from jaxcb.sim.cli import engine_config, parse
from jaxcb.sim.gpus import GPUS
from jaxcb.sim.models import MODELS
from jaxcb.sim.report import COMPARISON_HEADER, comparison_row, limits_line, result_table
from jaxcb.sim.simulator import Simulation, one_engine
from jaxcb.sim.sizing import limits_on
from jaxcb.sim.step_time import StepTimeModel
from jaxcb.sim.timeline import Timeline
from jaxcb.sim.traces import make_trace

_INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status. Whatever can't work is one line on stderr and status 1."""
    options = parse(arguments)
    try:
        return _reference(options) if options.command == "reference" else _run(options)
    except JaxcbError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED


def _reference(options: argparse.Namespace) -> int:
    trace, limits = reference.reference_trace(), reference.scheduler_limits()
    time_model = reference.STEP_TIME
    print(
        f"{len(trace):,} requests at once, prompts of 50 to 999 tokens, outputs of 10 to 999; "
        f"{reference.NUM_KV_TOKENS:,} KV tokens,\n"
        f"{limits.max_num_seqs} sequences, budget {limits.max_num_batched_tokens:,}; "
        f"a step takes {time_model.fixed_ms} ms and {time_model.per_token_ms} ms a token.\n\n{COMPARISON_HEADER}"
    )
    print(comparison_row("static, textbook", reference.static(trace)))
    textbook = reference.continuous(trace)
    print(comparison_row("continuous, textbook", textbook), flush=True)
    for run_ahead in (False, True):
        simulation = one_engine(limits, trace, time_model, run_ahead=run_ahead)
        done = _drive(simulation, progress=options.progress)
        totals = reference.totals_of(simulation.result())
        name = f"jaxcb, run-ahead {'on' if run_ahead else 'off'}"
        print(comparison_row(name, totals) + ("" if done else "  interrupted"), flush=True)
        if not done:
            return _INTERRUPTED
        if not run_ahead:
            in_step = totals
    print("\n" + reference.explanation(textbook, in_step, totals))
    return 0


def _run(options: argparse.Namespace) -> int:
    gpu, model, config = GPUS[options.gpu], MODELS[options.model], engine_config(options)
    limits = limits_on(gpu, model, config)
    trace = make_trace(options.trace, options.num_requests, rate=options.rate, seed=options.seed)
    timeline = Timeline(max_steps=_timeline_columns()) if options.timeline else None
    simulation = one_engine(
        limits,
        trace,
        StepTimeModel.of(model, gpu),
        run_ahead=config.run_ahead,
        on_plan=None if timeline is None else timeline.add,
    )
    started_s = time.perf_counter()
    done = _drive(simulation, progress=options.progress)
    wall_s = time.perf_counter() - started_s
    result = simulation.result()
    if options.json:
        print(json.dumps({"options": _given(options), "interrupted": not done, **result.summary()}, indent=2))
    else:
        arrivals = f"{options.rate:g} requests/s" if math.isfinite(options.rate) else "all requests at once"
        print(f"{options.trace}, {arrivals}: {model.name} on one {gpu.name}")
        print(limits_line(limits, run_ahead=config.run_ahead) + "\n")
        print(result_table(result))
        print(f"simulated    {result.num_output_tokens / wall_s:,.0f} output tokens a second of real time")
        if timeline is not None:
            print("\n" + timeline.text(result.requests))
        if not done:
            print("\ninterrupted: this is what was done so far")
    return 0 if done else _INTERRUPTED


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """What the run was asked for; JSON has no infinity, so an infinite rate is null."""
    given = {
        key: value for key, value in vars(options).items() if key not in ("command", "json", "timeline", "progress")
    }
    return given | {"rate": options.rate if math.isfinite(options.rate) else None}


def _drive(simulation: Simulation, *, progress: bool) -> bool:
    """Run to the end, or to Ctrl-C: then False."""
    disable = None if progress else True  # None: shown on a terminal only
    with tqdm(total=len(simulation.records), unit="request", leave=False, disable=disable) as bar:
        try:
            while simulation.step():
                if simulation.num_done > bar.n:
                    bar.update(simulation.num_done - bar.n)
        except KeyboardInterrupt:
            return False
    return True


def _timeline_columns() -> int:
    """What the terminal leaves beside the labels."""
    return max(shutil.get_terminal_size().columns - 20, 40)


if __name__ == "__main__":
    sys.exit(main())
