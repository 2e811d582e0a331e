"""Compiles the kernels for this CPU, once, into a directory that the caller names.

A variant is a set of instructions. The flags of each are written out: never -march=native, so that a library can be
copied to any machine whose CPU has them.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jaxlib

SOURCES = Path(__file__).parent / "src"
PREBUILT = Path(__file__).parent / "prebuilt"
"""Where a wheel carries libraries, <variant>-<hash>/libjaxcb.so: they are taken before anything is compiled."""
LIBRARY = "libjaxcb.so"
VARIANTS = {
    "avx512_bf16": ("-march=x86-64-v4", "-mavx512bf16"),
    "avx512": ("-march=x86-64-v4",),
    "avx2": ("-march=x86-64-v3",),
    "neon": ("-march=armv8-a",),
}
"""Compiler flags of each variant, the best one first."""
_HEADERS = Path(jaxlib.__file__).parent / "include"
_AVX2 = {"avx2", "fma", "f16c", "bmi2"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_CPU_FLAGS = {"avx512_bf16": _AVX512 | {"avx512_bf16"}, "avx512": _AVX512, "avx2": _AVX2}
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility-inlines-hidden", "-Wall", "-Wextra", "-Wno-unused-parameter")


class NativeError(RuntimeError):
    """The native kernels can't be used here; the message says why and what would help."""


def variants_of(machine: str) -> list[str]:
    """Variants of an architecture, as ``platform.machine()`` names it, the best one first."""
    if machine.lower() in ("aarch64", "arm64"):
        return ["neon"]
    return list(_CPU_FLAGS) if machine.lower() in ("x86_64", "amd64") else []


def cpu_variants() -> list[str]:
    """Variants that this CPU can run, the best one first; none where the kernels know no instructions of it."""
    flags = _cpu_flags()
    return [variant for variant in variants_of(platform.machine()) if _CPU_FLAGS.get(variant, set()) <= flags]


def compiler() -> str | None:
    """Path of the C++ compiler: ``$CXX``, else g++, else clang++; None if there is none."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
    return next((path for name in names if (path := shutil.which(name))), None)


def prebuilt(variant: str) -> Path | None:
    """The variant's library that came with the package, if it was made of these sources."""
    file = library(PREBUILT, variant, version="")
    return file if file.is_file() else None


def library(directory: Path, variant: str, *, version: str = jaxlib.__version__) -> Path:
    """Where the variant's library is, or will be: the name holds all that it depends on.

    Arguments:
        version: of jaxlib. A wheel's libraries have none in their names: XLA refuses one of another interface itself.
    """
    key = hashlib.sha256(f"{version} {_FLAGS} {VARIANTS[variant]}".encode())
    for source in sorted(SOURCES.iterdir()):
        key.update(source.read_bytes())
    return directory / f"{variant}-{key.hexdigest()[:16]}" / LIBRARY


def build(directory: Path, variant: str, *, version: str = jaxlib.__version__) -> Path:
    """Compile a variant unless it is there. A library in the directory is complete; a build that fails leaves nothing.
    ``version``: as for :func:`library`.

    Raises:
        NativeError: there is no compiler, it fails, or the directory can't be written.
    """
    target = library(directory, variant, version=version)
    if target.is_file():
        return target
    command = compiler()
    if command is None:
        raise NativeError("no C++ compiler: install g++ or clang++ (apt install g++, dnf install gcc-c++), or set CXX")
    # Of two libraries in one process, one could run the other's inline functions if they had the same names.
    flags = [*_FLAGS, *VARIANTS[variant], f"-Djaxcb=jaxcb_{variant}"]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory, prefix=".build-") as scratch:
            _compile(command, flags, Path(scratch))
            target.parent.mkdir(exist_ok=True)
            (Path(scratch) / LIBRARY).replace(target)  # in one step: another process may be at it too
    except OSError as error:
        raise NativeError(f"can't write {directory}: {error}. Set JAXCB_CACHE to a writable directory") from error
    return target


def _compile(command: str, flags: list[str], scratch: Path) -> None:
    """Every source to an object, several at once, then all of them to the library."""

    def one(source: Path) -> Path:
        target = scratch / f"{source.stem}.o"
        _run([command, *flags, "-isystem", str(_HEADERS), "-c", str(source), "-o", str(target)])
        return target

    with ThreadPoolExecutor() as workers:
        objects = list(workers.map(one, sorted(SOURCES.glob("*.cc"))))
    _run([command, *flags, "-shared", *map(str, objects), "-o", str(scratch / LIBRARY)])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        first = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
        raise NativeError(f"{command[0]} failed (status {done.returncode}): {first}")


def _cpu_flags() -> set[str]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    return set(next((line for line in lines if line.startswith("flags")), "").split())
