"""The persistent compilation cache: a second start loads its programs instead of compiling them."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

import jax


def enable_compilation_cache(directory: Path) -> None:
    """Keep compiled programs under ``directory``, unless the process has chosen a cache of its own.

    jax's key covers the program, its options and versions. It doesn't cover the CPU that code was generated for, which
    matters where a home directory is shared between machines: so each kind of CPU has its own folder.
    """
    if jax.config.values.get("jax_compilation_cache_dir") is not None:
        return
    jax.config.update("jax_compilation_cache_dir", str(directory / _machine()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _machine() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{jax.__version__}-{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:12]}"
