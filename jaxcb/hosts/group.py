"""The processes of all hosts as one jax, and which of its devices an engine is on."""

from __future__ import annotations

import socket

import jax

from jaxcb.config import EngineConfig
from jaxcb.errors import ConfigError

_NEVER_S = 2**30
"""Links find out who has died, and say so; jax would end every process that is left."""


def free_port(host: str) -> int:
    """One that jax can listen on, for now."""
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        return sock.getsockname()[1]


def join(config: EngineConfig, coordinator: str) -> None:
    """Start jax's distributed system. (:func:`jax.distributed.shutdown` ends it.)

    Arguments:
        coordinator: HOST:PORT for jax's own use, on the first host.

    Raises:
        ConfigError: jax can't be started so any more.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_recoverability", True)  # who is left may end in peace
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM for itself
    try:
        jax.distributed.initialize(
            coordinator,
            config.nnodes,
            config.node_rank,
            cluster_detection_method="deactivate",
            initialization_timeout=max(1, int(config.dist_timeout_s)),
            heartbeat_timeout_seconds=_NEVER_S,
            coordinator_bind_address=coordinator,
        )
    except RuntimeError as error:
        raise ConfigError(
            f"nnodes {config.nnodes}: jax can't be started over several hosts: {error} "
            "(Such an engine starts before anything else uses jax; parameters that you hold must be numpy's.)",
            param="nnodes",
        ) from error


def devices_of(config: EngineConfig) -> tuple[jax.Device, ...]:
    """As many of each host, its first, host by host.

    Raises:
        ConfigError: one has fewer.
    """
    each = config.tensor_parallel_size // config.nnodes
    devices: list[jax.Device] = []
    for rank in range(config.nnodes):
        there = [device for device in jax.devices() if device.process_index == rank]
        if len(there) < each:
            kind = there[0].device_kind if there else "nothing"
            hint = f". A CPU counts as one; with JAX_NUM_CPU_DEVICES={each} in the environment as {each}"
            raise ConfigError(
                f"tensor_parallel_size {config.tensor_parallel_size} on {config.nnodes} hosts needs {each} devices of "
                f"each, host {rank} has {len(there)} ({kind}){hint if kind == 'cpu' else ''}",
                param="tensor_parallel_size",
            )
        devices += there[:each]
    return tuple(devices)
