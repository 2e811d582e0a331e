"""The GPUs that tiles are chosen for, and what they can hold."""

from __future__ import annotations

import dataclasses

import jax

from pallas_kernels.platform import device_kind, platform


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU, as far as the kernels care.

    Arguments:
        name: key of the tile table.
        device: what its maker calls it.
        compute_capability: major and minor.
        shared_memory_bytes: most that one program may ask for.
        num_cores: streaming multiprocessors.
    """

    name: str
    device: str
    compute_capability: tuple[int, int]
    shared_memory_bytes: int
    num_cores: int

    @property
    def has_float8(self) -> bool:
        """Whether it converts float8_e4m3fn: Ada and Hopper were the first to."""
        return self.compute_capability >= (8, 9)

    def has_what(self, other: Target) -> bool:
        """Whether it runs a program whose tiles were chosen for another."""
        return (
            self.shared_memory_bytes >= other.shared_memory_bytes
            and self.compute_capability >= other.compute_capability
        )


TARGETS = {
    # NVIDIA's CUDA programming guide, table "technical specifications per compute capability", and the data sheets.
    "h200": Target("h200", "NVIDIA H200", (9, 0), 232_448, 132),
    "h100": Target("h100", "NVIDIA H100", (9, 0), 232_448, 132),
    "a100": Target("a100", "NVIDIA A100", (8, 0), 166_912, 108),
    "l4": Target("l4", "NVIDIA L4", (8, 9), 101_376, 58),
}


def default_target() -> Target:
    """The entry for the GPU that a program is traced for: the same card, or the tiles and the shared memory of the one
    with as little, under its own name and with what its own compute capability brings.

    Without a GPU (kernels in the interpreter) it is an H200 with one core: the interpreter runs one program at a time.
    """
    if platform() != "gpu":
        return dataclasses.replace(TARGETS["h200"], num_cores=1)
    if (named := _named()) is not None:
        return named
    alike = {(9, 0): "h100", (10, 0): "h100", (10, 3): "h100", (8, 0): "a100"}.get(device_capability(), "l4")
    return dataclasses.replace(TARGETS[alike], device=device_kind(), compute_capability=device_capability())


def device_capability() -> tuple[int, int]:
    """Compute capability of the GPU that a program is traced for; of the first one that there is, if it isn't named
    here."""
    if (named := _named()) is not None:
        return named.compute_capability
    major, minor = str(jax.devices()[0].compute_capability).split(".")
    return int(major), int(minor)


def _named() -> Target | None:
    words = device_kind().upper().replace("-", " ").split()  # NVIDIA A100-SXM4-80GB
    return next((target for name, target in TARGETS.items() if name.upper() in words), None)
