"""The kernels of every variant against plain loops (compared.cc): this CPU's own, NEON under qemu, AVX-512 emulated."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from pallas_kernels.native.build import SOURCES, VARIANTS, compiler, cpu_variants

pytestmark = pytest.mark.native
HERE = Path(__file__).parent
SEED, ROUNDS = "1", "40"


def compared(command: list[str], tmp_path: Path, runner: tuple[str, ...] = ()) -> None:
    program = tmp_path / "compared"
    sources = [HERE / "compared.cc", *(SOURCES / name for name in ("attention.cc", "place.cc", "product.cc"))]
    flags = ["-std=c++20", "-pthread", f"-I{SOURCES}", *map(str, sources), "-o", str(program)]
    built = subprocess.run([*command, *flags], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-3000:]
    ran = subprocess.run([*runner, str(program), SEED, ROUNDS], capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, f"seed {SEED}\n{ran.stdout[-3000:]}{ran.stderr[-1000:]}"
    assert ran.stdout.startswith("of what is allowed"), ran.stdout


@pytest.mark.parametrize("variant", cpu_variants())
def test_this_cpu(variant, tmp_path):
    compared([str(compiler()), "-O0", *VARIANTS[variant]], tmp_path)


def test_neon_under_qemu(tmp_path):
    cross, qemu = (shutil.which(name) for name in ("aarch64-linux-gnu-g++", "qemu-aarch64"))
    if cross is None or qemu is None:
        pytest.skip("needs a compiler and an emulator of aarch64: apt install g++-aarch64-linux-gnu qemu-user")
    compared([cross, "-O1", *VARIANTS["neon"], "-static"], tmp_path, (qemu,))


@pytest.mark.slow  # a minute to compile
@pytest.mark.parametrize("variant, number", [("avx512", 1), ("avx512_bf16", 2)])
def test_avx512_computed_by_simde(variant, number, tmp_path):
    """The source of the variant, each of whose intrinsics a library computes with what this CPU has."""
    if not Path("/usr/include/simde/x86/avx512.h").is_file() or "avx2" not in cpu_variants():
        pytest.skip("needs SIMDe and a CPU with AVX2: apt install libsimde-dev")
    emulated = ["-include", str(HERE / "emulated.h"), f"-DJAXCB_EMULATED={number}", *VARIANTS["avx2"]]
    compared([str(compiler()), "-O1", *emulated], tmp_path)
