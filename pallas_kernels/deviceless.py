"""Compiling for a GPU on a machine that has none: the plug-in in a folder of its own, and descriptions of GPUs.

The plug-in holds the whole compiler. It wants a description of the GPU instead of a driver, and jax must find it before
it starts: run what uses this in a process of its own, with :func:`environment`.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

PLUGIN_FOLDER = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pallas_kernels"

INSTALL_TIMEOUT_S = 1200


class NoPluginError(RuntimeError):
    """The plug-in could not be installed; the message holds pip's reason."""


def install_plugin(folder: Path | None = None) -> Path:
    """The folder with the CUDA plug-in of the installed jax and ptxas; installs them there if they aren't (0.5 GB), or
    are those of another jax or Python.

    Raises:
        NoPluginError: no registry has them, or none can be reached.
    """
    version = importlib.metadata.version("jax")
    cuda = "12" if version.startswith("0.10.") else "13"  # the newest that each has wheels for on its Python
    folder = folder or PLUGIN_FOLDER / f"cuda{cuda}-jax{version}-py{sys.version_info.major}{sys.version_info.minor}"
    mark, contents = folder / "installed", f"jax {version}, Python {sys.version_info.major}.{sys.version_info.minor}\n"
    if mark.exists() and mark.read_text() == contents:
        return folder
    mark.unlink(missing_ok=True)
    nvcc = "nvidia-cuda-nvcc-cu12" if cuda == "12" else "nvidia-cuda-nvcc>=13,<14"  # for ptxas
    wheels = [f"jax-cuda{cuda}-plugin=={version}", f"jax-cuda{cuda}-pjrt=={version}", nvcc]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(folder)]
    try:
        result = subprocess.run([*pip, *wheels], capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise NoPluginError(f"{', '.join(wheels)} did not arrive in {INSTALL_TIMEOUT_S} s") from error
    if result.returncode:
        reasons = [line for line in result.stderr.splitlines() if "ERROR" in line] or [result.stderr[-500:]]
        raise NoPluginError(f"{', '.join(wheels)} could not be installed: {reasons[-1]}")
    mark.write_text(contents)
    return folder


def ptxas(folder: Path) -> Path:
    """The assembler beside the plug-in."""
    return next(folder.glob("nvidia/*/bin/ptxas"))


def environment(folder: Path, dump: Path | None = None) -> dict[str, str]:
    """Environment of a process that compiles for a GPU. ``dump``: where XLA leaves PTX and thunks."""
    flags = os.environ.get("XLA_FLAGS", "")
    if dump is not None:
        # With all of what emitters can leave, the passes of a Triton kernel take five times as long as compiling it.
        flags += f" --xla_dump_to={dump} --xla_dump_emitter_re=ptx"
    # The plug-in comes after everything else: the folder may hold older copies of what is installed.
    path = os.pathsep.join(x for x in (os.environ.get("PYTHONPATH", ""), str(folder)) if x)
    return os.environ | {
        "PYTHONPATH": path,
        "XLA_FLAGS": flags.strip(),
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        # Where there is an llvm-symbolizer, the compiler reads its own 400 MB with it again and again.
        "LLVM_DISABLE_SYMBOLIZATION": "1",
    }


def compile_for(
    function: Callable[..., Any], arguments: tuple[Any, ...], target: str, *, donate: tuple[int, ...] = ()
) -> jax.stages.Compiled:
    """Compile for one GPU of ``target``. ``arguments``: ShapeDtypeStructs, or arrays, of which shapes are taken."""
    with target_mesh(target) as mesh:
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
        jitted = jax.jit(function, donate_argnums=donate, out_shardings=sharding)
        return jitted.trace(*shapes).lower(lowering_platforms=("cuda",)).compile()


def memory_bytes(target: str) -> int:
    """Memory of a target."""
    found = re.search(r"device_memory_size: (\d+)", _DESCRIPTIONS[target])
    assert found is not None, "every description says it"
    return int(found.group(1))


@contextmanager
def target_mesh(target: str, num_devices: int = 1, axis: str = "device") -> Iterator[jax.sharding.Mesh]:
    """A mesh of described GPUs, in one machine. Inside, Pallas finds them where it asks for the kind of the device."""
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="cuda", target_config=_DESCRIPTIONS[target], topology=f"1x1x{num_devices}"
    )
    mesh = topologies.make_mesh(topology, (num_devices,), (axis,))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield mesh


def _description(
    name: str,
    capability: str,
    *,
    cores: int,
    threads_a_core: int,
    core_memory: int,
    program_memory: int,
    bandwidth: int,
    l2: int,
    clock: float,
    memory: int,
    lanes: int = 128,
) -> str:
    """XLA's GpuTargetConfigProto in text: data sheets, and the CUDA programming guide's table of limits."""
    return f"""
    gpu_device_info {{
      threads_per_block_limit: 1024 threads_per_warp: 32
      shared_memory_per_block: 49152 shared_memory_per_core: {core_memory}
      threads_per_core_limit: {threads_a_core} core_count: {cores} fpus_per_core: {lanes}
      block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
      memory_bandwidth: {bandwidth} l2_cache_size: {l2} clock_rate_ghz: {clock}
      device_memory_size: {memory} shared_memory_per_block_optin: {program_memory}
      cuda_compute_capability {{ {capability} }}
      registers_per_core_limit: 65536 registers_per_block_limit: 65536
      thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
      device_vendor: "NVIDIA Corporation" platform_version: "CUDA" device_address_bits: 64
      pcie_bandwidth: 34359738368 ecc_enabled: true name: "{name}"
      driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
    }}
    platform_name: "CUDA"
    device_description_str: "{name}"
    """


_HOPPER: dict[str, Any] = {"cores": 132, "threads_a_core": 2048, "core_memory": 233_472, "program_memory": 232_448}
_HOPPER |= {"capability": "major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES", "l2": 52_428_800, "clock": 1.98}
_DESCRIPTIONS = {
    "h200": _description("NVIDIA H200", **_HOPPER, bandwidth=4_800 * 10**9, memory=151_397_597_184),
    "h100": _description("NVIDIA H100 80GB HBM3", **_HOPPER, bandwidth=3_350 * 10**9, memory=84_942_979_072),
    "a100": _description(
        "NVIDIA A100-SXM4-80GB",
        "major: 8 minor: 0 feature_extension: NONE",
        cores=108,
        threads_a_core=2048,
        core_memory=167_936,
        program_memory=166_912,
        bandwidth=2_039 * 10**9,
        l2=41_943_040,
        clock=1.41,
        memory=85_100_068_864,
        lanes=64,
    ),
    "l4": _description(
        "NVIDIA L4",
        "major: 8 minor: 9 feature_extension: NONE",
        cores=58,
        threads_a_core=1536,
        core_memory=102_400,
        program_memory=101_376,
        bandwidth=300 * 10**9,
        l2=50_331_648,
        clock=2.04,
        memory=23_000_000_000,
    ),
}
