"""The kernels under the sanitizers: stray addresses, undefined behaviour, races between threads."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pallas_kernels.native.build import SOURCES, VARIANTS, compiler, cpu_variants

pytestmark = pytest.mark.native
KERNELS = ("attention.cc", "place.cc", "product.cc")


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_nothing_is_found_over_random_shapes(sanitizer, tmp_path):
    program, seed = tmp_path / "sanitized", 20
    command = [
        str(compiler()),
        "-std=c++20",
        "-O0",  # half the time to build, and every access is there to be watched
        "-g",
        *VARIANTS[cpu_variants()[0]],
        f"-fsanitize={sanitizer}",
        "-fno-sanitize-recover=all",
        "-pthread",
        f"-I{SOURCES}",
        str(Path(__file__).with_name("sanitized.cc")),
        *(str(SOURCES / name) for name in KERNELS),
        "-o",
        str(program),
    ]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode and "cannot find" in built.stderr:
        pytest.skip(f"this compiler has no {sanitizer} sanitizer: {built.stderr.strip().splitlines()[-1]}")
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([str(program), str(seed), "40"], capture_output=True, text=True, timeout=300)
    assert (ran.returncode, ran.stdout.strip()) == (0, "done"), f"seed {seed}\n{ran.stderr[-3000:]}"
