"""Compiles cases of the compile report and says what each became, in a process of its own (see ``deviceless``).

Prints one line of JSON a case:

    python -m pallas_kernels.compile_worker TARGET DUMP_FOLDER PTXAS CASE...
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pallas_kernels.compile_case import Case, num_bytes
from pallas_kernels.compile_cases import kernel_cases
from pallas_kernels.compile_steps import step_cases
from pallas_kernels.deviceless import compile_for

ARCHITECTURES = {"h200": "sm_90a", "h100": "sm_90a", "a100": "sm_80", "l4": "sm_89"}
KERNELS = r"(ragged_paged|decode|\w+_pages|(?:add_)?rms_norm|silu|rope|least|grouped|\w*mosaic_gpu_kernel)"
"""How the entry points of our kernels begin; XLA's own have other names."""


def compile_step(case: Case, target: str, dump: Path) -> dict[str, Any]:
    """What a whole step became: bytes aliased and temporary, copies as large as a layer's share, CUDA graphs."""
    pool = case.arguments[1]
    compiled = compile_for(case.function, case.arguments, target, donate=(1,))
    memory, layer_bytes = compiled.memory_analysis(), num_bytes(pool) // pool.shape[1]
    text = compiled.as_text()
    assert memory is not None and text is not None, "the compiler reports both"
    copies = [
        shape
        for shape in re.findall(r"= bf16\[([\d,]+)\]\S* copy(?:-start)?\(", text)
        if 2 * functools.reduce(lambda a, b: a * int(b), shape.split(","), 1) >= layer_bytes
    ]
    return {
        "pool_bytes": num_bytes(pool),
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "layer_bytes": layer_bytes,
        "pool_sized_copies": copies,
        "top_thunks": re.findall(r"^\d+: (k\w+)", _launches(dump), re.M),
    }


def compile_kernels(case: Case, target: str, dump: Path, ptxas: Path) -> dict[str, Any]:
    """Registers, spilled bytes and shared memory of each Pallas kernel of a case."""
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(dump)
    before = set(dump.glob("*.ptx"))
    compile_for(case.function, case.arguments, target)
    launches, kernels = _launches(dump), dict[str, Any]()
    for path in sorted(set(dump.glob("*.ptx")) - before):
        text = path.read_text()
        for entry in re.findall(rf"\.entry ({KERNELS}\w*)", text):
            name = entry[0]
            facts: dict[str, Any] = assemble(path, ptxas, target)
            facts["shared_bytes"] = facts.pop("static_shared_bytes") + _asked_at_launch(name, path, launches)
            facts["tensor_core"] = "wgmma" if "wgmma" in text else "mma" if "mma.sync" in text else ""
            if name in case.promised_bytes:
                facts["promised_bytes"] = case.promised_bytes[name]
            kernels[name] = facts
    if len(kernels) < case.num_kernels or not case.promised_bytes.keys() <= kernels.keys():
        expected = f"{case.num_kernels} kernels, {sorted(case.promised_bytes)} among them, were expected"
        raise RuntimeError(f"XLA left the PTX of {sorted(kernels)} in {dump}, {expected}")
    return {"kernels": kernels}


def _launches(dump: Path) -> str:
    """What the program compiled last launches, as XLA lists it."""
    # Beside the list there is one after the passes, if they changed it: it comes later, in time and in the alphabet.
    return max(dump.glob("*thunk_sequence*.txt"), key=lambda path: (path.stat().st_mtime_ns, path.name)).read_text()


def _asked_at_launch(kernel: str, ptx: Path, launches: str) -> int:
    """Shared memory that the kernel gets when it is launched. Mosaic launches its own and leaves the module beside the
    PTX."""
    if kernel.endswith("mosaic_gpu_kernel"):
        text, pattern = ptx.with_suffix(".after_layout_inference.txt").read_text(), r"shared_memory_size %c(\d+)_i32"
    else:
        text, pattern = launches, rf" {kernel} grid: .* shared_memory: (\d+) bytes"
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"the compiler doesn't say how much shared memory {kernel} is launched with")
    return int(found.group(1))


def assemble(ptx: Path, ptxas: Path, target: str) -> dict[str, int]:
    """What ``ptxas -v`` says of a kernel. Shared memory that it is launched with isn't in there."""
    command = [str(ptxas), "-v", f"-arch={ARCHITECTURES[target]}", "-o", "/dev/null", str(ptx)]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    text = said.stdout + said.stderr

    def number(pattern: str) -> int:
        return max((int(x) for x in re.findall(pattern, text)), default=0)

    return {
        "registers": number(r"Used (\d+) registers"),
        "spill_bytes": number(r"(\d+) bytes spill stores"),
        "static_shared_bytes": number(r"(\d+) bytes smem"),
    }


def main() -> None:
    target, dump, ptxas = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    for name in sys.argv[4:]:
        began = time.perf_counter()
        try:
            steps = step_cases(target)
            if name in steps:
                found = compile_step(steps[name](), target, dump)
            else:
                found = compile_kernels(kernel_cases(target)[name], target, dump, ptxas)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"[:2000]}
        print(json.dumps({"case": name, "seconds": round(time.perf_counter() - began, 1)} | found), flush=True)


if __name__ == "__main__":
    main()
