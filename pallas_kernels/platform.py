"""What a program that is being traced will run on: the device that jax has, or one that it is compiled for without.

A mesh of a described GPU that is in use (:func:`pallas_kernels.deviceless.target_mesh`) says which; jax's own kernels
ask it too. It is part of the key under which jax keeps traces, so that none made for a CPU is taken for a GPU.
"""

from __future__ import annotations

import jax


def platform() -> str:
    """Its kind: "cpu", "gpu", and others that jax knows."""
    described = _described()
    return jax.default_backend() if described is None else described.platform


def device_kind() -> str:
    """The name of the device, as its maker writes it: "NVIDIA H200"."""
    described = _described()
    return jax.devices()[0].device_kind if described is None else described.device_kind


def _described() -> jax.sharding.AbstractDevice | None:
    return jax.sharding.get_abstract_mesh().abstract_device
