"""Compile every kernel configuration and whole steps for a GPU, on a machine with none, and judge what comes out.

    python -m pallas_kernels.compile_report --target h200        # h100, a100, l4; all if none is named

Prints registers, spilled bytes, shared memory and tensor-core instructions of each kernel, and what whole steps became;
ends with status 1 if a bound is broken: no kernel may spill more than 16 bytes a thread, or be launched with more
shared memory than the target has or the tile table promises, and a step of 30 layers updates its pages in place and is
one CUDA graph. The compiler is installed into a folder of its own first (about 0.6 GB, once); where no registry has it,
the status is 77 and the reason is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pallas_kernels.compile_cases import kernel_cases
from pallas_kernels.compile_steps import step_cases
from pallas_kernels.deviceless import NoPluginError, environment, install_plugin, ptxas
from pallas_kernels.triton.targets import TARGETS

MOST_SPILL_BYTES = 16
"""Bytes a thread may spill: a register or two outside the loop cost nothing, more sit inside it."""
CASES_A_PROCESS = 4
"""A compiler that aborts takes its process along, and starting one takes as long as compiling two cases."""
PROCESS_TIMEOUT_S = 1800

SKIPPED = 77
"""Status where nothing could be compiled, as automake's tests have it."""


def report(target: str, cases: Sequence[str], folder: Path, *, jobs: int = 1) -> Iterator[dict[str, Any]]:
    """Compile the cases, a few a process and ``jobs`` processes at once; yields what each became, in order.

    Arguments:
        folder: where the plug-in is.
    """
    batches = [list(cases[first : first + CASES_A_PROCESS]) for first in range(0, len(cases), CASES_A_PROCESS)]
    with ThreadPoolExecutor(jobs) as pool:
        for found in pool.map(lambda batch: _compile(target, batch, folder), batches):
            yield from found


def _compile(target: str, cases: list[str], folder: Path) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as dump:
        module = [sys.executable, "-m", "pallas_kernels.compile_worker", target, dump, str(ptxas(folder))]
        try:
            done = subprocess.run(
                [*module, *cases],
                env=environment(folder, Path(dump)),
                capture_output=True,
                text=True,
                timeout=PROCESS_TIMEOUT_S,
            )
            printed, died = done.stdout, f"the compiler died with {done.returncode}: {done.stderr[-1000:]}"
        except subprocess.TimeoutExpired as late:  # what it printed comes as bytes
            printed = (late.stdout or b"").decode()
            died = f"the compiler took longer than {PROCESS_TIMEOUT_S} s over this case or one before it"
    found = [json.loads(line) for line in printed.splitlines() if line.startswith('{"case"')]
    found += [{"case": name, "error": died} for name in cases[len(found) :]]
    return [{"target": target} | each for each in found]


def problems(found: dict[str, Any]) -> list[str]:
    """What is wrong with a case; nothing, if all is well."""
    if "error" in found:
        return [found["error"]]
    out, limit = [], TARGETS[found["target"]].shared_memory_bytes
    for name, kernel in found.get("kernels", {}).items():
        shared = kernel["shared_bytes"]
        if kernel["spill_bytes"] > MOST_SPILL_BYTES:
            out.append(f"{name} spills {kernel['spill_bytes']} bytes a thread, {MOST_SPILL_BYTES} are allowed")
        if shared > limit:
            out.append(f"{name} is launched with {shared:,} bytes of shared memory, there are {limit:,}")
        if shared > kernel.get("promised_bytes", shared):
            out.append(f"{name} is launched with {shared:,} bytes of shared memory, not {kernel['promised_bytes']:,}")
    if "alias_bytes" in found:
        if found["alias_bytes"] < found["pool_bytes"]:
            out.append(f"only {found['alias_bytes']:,} of the pool's {found['pool_bytes']:,} bytes are aliased")
        if found["pool_sized_copies"]:
            out.append(f"copies as large as a layer's pages: {', '.join(found['pool_sized_copies'])}")
        if found["top_thunks"] != ["kCommandBuffer"]:
            out.append(f"not one CUDA graph but {len(found['top_thunks'])} launches: {found['top_thunks'][:8]}")
    return out


def lines(found: dict[str, Any]) -> list[str]:
    """Rows of the printed table."""
    name, wrong = found["case"], problems(found)
    out = []
    for kernel, facts in sorted(found.get("kernels", {}).items()):
        numbers = (facts["registers"], facts["spill_bytes"], f"{facts['shared_bytes']:,}", facts["tensor_core"] or "-")
        out.append(f"{name:42s} {kernel:32s} {numbers[0]:>9} {numbers[1]:>7} {numbers[2]:>8} {numbers[3]:>6}")
    if "alias_bytes" in found:
        temp, alias = found["temp_bytes"] / 1e6, found["alias_bytes"] / 1e6
        out.append(f"{name:42s} alias {alias:.1f} MB, temp {temp:.1f} MB, launches {len(found['top_thunks'])}")
    return out + [f"{name:42s} WRONG: {line}" for line in wrong]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=sorted(TARGETS), action="append", help="may be given several times")
    parser.add_argument("--plugin", type=Path, help="folder of the CUDA plug-in; default: one in the user's cache")
    parser.add_argument("--install", action="store_true", help="install the compiler and stop")
    parser.add_argument("--only", default="", help="only the cases whose name holds this")
    parser.add_argument("--jobs", type=int, default=_cores(), help="processes at once; default: the cores, at most 4")
    parser.add_argument("--json", type=Path, help="write everything there")
    options = parser.parse_args(arguments)
    try:
        folder = install_plugin(options.plugin)
    except NoPluginError as error:
        print(f"nothing is compiled: {error}")
        return SKIPPED
    if options.install:
        return 0
    found = []
    for target in options.target or list(TARGETS):
        cases = [name for name in (*step_cases(target), *kernel_cases(target)) if options.only in name]
        print(f"\n{target}\n{'case':42s} {'kernel':32s} registers  spills   shared tensor", flush=True)
        for case in report(target, cases, folder, jobs=options.jobs):
            found.append(case)
            print("\n".join(lines(case)), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    wrong = sum(len(problems(case)) for case in found)
    print(f"\n{len(found)} cases, {wrong} problems")
    return 1 if wrong else 0


def _cores() -> int:
    return min(len(os.sched_getaffinity(0)), 4)


if __name__ == "__main__":
    sys.exit(main())
