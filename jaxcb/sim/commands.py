"""What each command does. Each returns the exit status; 130 after Ctrl-C, when it has printed what was done so far."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jaxcb.config import EngineConfig
from jaxcb.errors import ConfigError
from jaxcb.presets import PRESETS
from jaxcb.scheduler import StepPlan
from jaxcb.sim import reference, report
from jaxcb.sim.calibrate import fit, read_step_log
from jaxcb.sim.cli import engine_settings
from jaxcb.sim.clusters import Cluster, Machine, cluster_of, own_cluster
from jaxcb.sim.comparison import Limits, Row, default_presets, rows
from jaxcb.sim.gpus import GPUS
from jaxcb.sim.mechanisms import MECHANISMS
from jaxcb.sim.models import MODELS
from jaxcb.sim.perfetto import PerfettoTrace
from jaxcb.sim.simulator import Simulation, one_engine, run
from jaxcb.sim.sweep import BUDGETS, SEQS, Point, sweep
from jaxcb.sim.timeline import Timeline
from jaxcb.sim.trace import TraceRequest
from jaxcb.sim.traces import make_trace

INTERRUPTED = 130
_PLOTTED_STEPS = 60


def run_command(options: argparse.Namespace) -> int:
    """One trace on one system."""
    check_outputs(options)
    machine, trace = _machine(options, 1), _trace(options)
    cluster = _cluster(options, machine)
    timeline = Timeline(_timeline_columns() if not options.plot else _PLOTTED_STEPS)
    perfetto = PerfettoTrace() if options.trace else None

    def watch(index: int) -> Any:
        def on_plan(plan: StepPlan, start_s: float, step_s: float) -> None:
            if index == 0 and (options.timeline or options.plot):
                timeline.add(plan, start_s, step_s)
            if perfetto is not None:
                perfetto.add(index, plan, start_s, step_s)

        return on_plan if options.timeline or options.plot or perfetto else None

    cluster = dataclasses.replace(
        cluster, specs=tuple(dataclasses.replace(spec, on_plan=watch(i)) for i, spec in enumerate(cluster.specs))
    )
    simulation = cluster.simulation(trace)
    started_s = time.perf_counter()
    done = drive("simulating", simulation, progress=options.progress)
    wall_s = time.perf_counter() - started_s
    result = simulation.result()
    if options.json:
        print(json.dumps({"options": _given(options), "interrupted": not done, **result.summary()}, indent=2))
    else:
        limits = cluster.specs[0].limits
        print(_title(options, machine, trace) + (f", as {options.preset}" if options.preset else ""))
        print(report.limits_line(limits, run_ahead=cluster.specs[0].run_ahead) + "\n")
        print(report.result_table(result))
        print(f"simulated    {result.num_output_tokens / wall_s:,.0f} output tokens a second of real time")
        if options.timeline:
            print("\n" + timeline.text(result.requests))
        if not done:
            print("\ninterrupted: this is what was done so far")
    if options.plot:
        from jaxcb.sim.pictures import draw_timeline

        draw_timeline(timeline, result.requests, Path(options.plot))
    if perfetto is not None:
        perfetto.write(Path(options.trace))
    return 0 if done else INTERRUPTED


def compare_command(options: argparse.Namespace) -> int:
    """Many systems on one trace."""
    check_outputs(options)
    machine, trace = _machine(options, 2), _trace(options)
    names = options.presets or default_presets(machine.num_gpus)
    limits = Limits(ttft_s=options.ttft_ms / 1e3, tpot_s=options.tpot_ms / 1e3)
    done: list[Row] = []
    driver = _Driver(options.progress)
    for row in rows(names, trace, machine, limits=limits, given=engine_settings(options), drive=driver):
        done.append(row)
    if options.json:
        print(json.dumps({"options": _given(options), "rows": [row.summary() for row in done]}, indent=2))
    else:
        print(_title(options, machine, trace))
        print(f"goodput: TTFT within {options.ttft_ms:g} ms and TPOT within {options.tpot_ms:g} ms\n")
        print(report.comparison_tables(done))
    if options.plot:
        from jaxcb.sim.pictures import draw_comparison

        draw_comparison(done, Path(options.plot), title=_title(options, machine, trace))
    return _ending(driver, f"{len(done)} of {len(names)} systems", options)


def sweep_command(options: argparse.Namespace) -> int:
    """A grid of budgets and batch sizes."""
    check_outputs(options)
    machine, trace = _machine(options, 1), _trace(options)
    limits = Limits(ttft_s=options.ttft_ms / 1e3, tpot_s=options.tpot_ms / 1e3)
    driver = _Driver(options.progress)
    grid = [(budget, seqs) for seqs in options.seqs or SEQS for budget in options.budgets or BUDGETS if budget >= seqs]
    points: list[Point] = list(
        sweep(
            grid,
            trace,
            machine,
            preset=options.preset,
            given=engine_settings(options),
            limits=limits,
            drive=driver,
        )
    )
    if options.json:
        print(json.dumps({"options": _given(options), "points": [point.summary() for point in points]}, indent=2))
    else:
        print(_title(options, machine, trace) + "\n")
        print(report.sweep_table(points))
    if options.plot:
        from jaxcb.sim.pictures import draw_sweep

        draw_sweep(points, Path(options.plot), title=_title(options, machine, trace))
    return _ending(driver, f"{len(points)} of {len(grid)} points", options)


def mechanisms_command(_options: argparse.Namespace) -> int:
    """Each idea, without and with."""
    print(f"{'':45}{'measure':17}{'without':>10}{'with':>10}{'better':>10}")
    for mechanism in MECHANISMS:
        effect = mechanism()
        print(
            f"{effect.idea:45}{effect.measure:17}{effect.without:10,.2f}{effect.with_it:10,.2f}{effect.multiple:9.2f}x",
            flush=True,
        )
    return 0


def presets_command(options: argparse.Namespace) -> int:
    """What there is."""
    if options.json:
        print(json.dumps({name: dataclasses.asdict(preset) for name, preset in PRESETS.items()}, indent=2))
    else:
        print(report.preset_list())
    return 0


def reference_command(options: argparse.Namespace) -> int:
    """The textbook's experiment."""
    trace, limits = reference.reference_trace(), reference.scheduler_limits()
    time_model = reference.STEP_TIME
    print(
        f"{len(trace):,} requests at once, prompts of 50 to 999 tokens, outputs of 10 to 999; "
        f"{reference.NUM_KV_TOKENS:,} KV tokens,\n"
        f"{limits.max_num_seqs} sequences, budget {limits.max_num_batched_tokens:,}; "
        f"a step takes {time_model.fixed_ms} ms and {time_model.per_token_ms} ms a token.\n\n{report.REFERENCE_HEADER}"
    )
    print(report.reference_row("static, textbook", reference.static(trace)))
    textbook = reference.continuous(trace)
    print(report.reference_row("continuous, textbook", textbook), flush=True)
    for run_ahead in (False, True):
        simulation = one_engine(limits, trace, time_model, run_ahead=run_ahead)
        done = drive("simulating", simulation, progress=options.progress)
        totals = reference.totals_of(simulation.result())
        name = f"jaxcb, run-ahead {'on' if run_ahead else 'off'}"
        print(report.reference_row(name, totals) + ("" if done else "  interrupted"), flush=True)
        if not done:
            return INTERRUPTED
        if not run_ahead:
            in_step = totals
    print("\n" + reference.explanation(textbook, in_step, totals))
    return 0


def drive(name: str, simulation: Simulation, *, progress: bool) -> bool:
    """Run to the end, or to Ctrl-C: then False."""
    disable = None if progress else True  # None: shown on a terminal only
    with tqdm(desc=name, total=len(simulation.records), unit="request", leave=False, disable=disable) as bar:

        def update() -> None:
            if simulation.num_done > bar.n:
                bar.update(simulation.num_done - bar.n)

        try:
            run(simulation, update)
        except KeyboardInterrupt:
            return False
    return True


class _Driver:
    """Drives one simulation after the other, and remembers whether it was interrupted."""

    def __init__(self, progress: bool):
        self._progress = progress
        self.interrupted = False

    def __call__(self, name: str, simulation: Simulation) -> bool:
        done = drive(name, simulation, progress=self._progress)
        self.interrupted |= not done
        return done


def _cluster(options: argparse.Namespace, machine: Machine) -> Cluster:
    """The system of ``run``: a preset, or this engine with its compiled sizes; with step times of a log, if given."""
    settings = engine_settings(options)
    if options.preset:
        cluster = cluster_of(options.preset, machine, given=settings)
    else:
        cluster = own_cluster(machine, EngineConfig(**settings))
    if options.step_log is None:
        return cluster
    log = read_step_log(Path(options.step_log))
    measured = fit(log)
    specs = [dataclasses.replace(spec, step_time=measured, padding=log.padded) for spec in cluster.specs]
    return dataclasses.replace(cluster, specs=tuple(specs))


def check_outputs(options: argparse.Namespace) -> None:
    """Refuse files that can't be written before anything is simulated.

    Raises:
        ConfigError: a name has the wrong ending, or its folder isn't there.
    """
    for flag, suffix in (("plot", ".png"), ("trace", ".json")):
        name = getattr(options, flag, None)
        if name is None:
            continue
        if not name.endswith(suffix):
            hint = "; the traffic is --workload" if flag == "trace" else ""
            raise ConfigError(f"--{flag} is a file to write and must end in {suffix}, got {name!r}{hint}", param=flag)
        if flag == "plot" and importlib.util.find_spec("matplotlib") is None:
            raise ConfigError("--plot needs matplotlib: pip install -e '.[bench]'", param=flag)
        if not Path(name).parent.is_dir():
            raise ConfigError(f"--{flag}: there is no folder {Path(name).parent}", param=flag)


def _ending(driver: _Driver, what: str, options: argparse.Namespace) -> int:
    if driver.interrupted and not options.json:
        print(f"\ninterrupted: {what}, and the last one only in part")
    return INTERRUPTED if driver.interrupted else 0


def _machine(options: argparse.Namespace, num_gpus: int) -> Machine:
    count = num_gpus if options.num_gpus is None else options.num_gpus
    if count < 1:
        raise ConfigError(f"num_gpus must be at least 1, got {count}", param="num_gpus")
    return Machine(model=MODELS[options.model], gpu=GPUS[options.gpu], num_gpus=count)


def _trace(options: argparse.Namespace) -> list[TraceRequest]:
    return make_trace(
        options.workload,
        options.num_requests,
        rate=options.rate,
        gap_cv=options.gap_cv,
        num_users=options.num_users,
        seed=options.seed,
    )


def _title(options: argparse.Namespace, machine: Machine, trace: Sequence[TraceRequest]) -> str:
    if options.num_users is not None:
        arrivals = f"{options.num_users} users"
    elif options.rate is not None and math.isfinite(options.rate):
        arrivals = f"{options.rate:g} requests/s"
    elif any(request.arrival_s for request in trace):
        arrivals = "its own arrivals"
    else:
        arrivals = "all requests at once"
    gpus = f"one {machine.gpu.name}" if machine.num_gpus == 1 else f"{machine.num_gpus} x {machine.gpu.name}"
    title = f"{len(trace):,} of {options.workload}, {arrivals}: {machine.model.name} on {gpus}"
    step_log = getattr(options, "step_log", None)
    return title if step_log is None else f"{title}, with the step times of {step_log}"


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """What the run was asked for; JSON has no infinity, so an infinite rate is null."""
    left_out = ("command", "json", "timeline", "progress", "plot")
    given = {key: value for key, value in vars(options).items() if key not in left_out}
    infinite = options.rate is not None and not math.isfinite(options.rate)
    return given | {"rate": None} if infinite else given


def _timeline_columns() -> int:
    """What the terminal leaves beside the labels."""
    return max(shutil.get_terminal_size().columns - 20, 40)


COMMANDS = {
    "run": run_command,
    "compare": compare_command,
    "sweep": sweep_command,
    "mechanisms": mechanisms_command,
    "presets": presets_command,
    "reference": reference_command,
}
