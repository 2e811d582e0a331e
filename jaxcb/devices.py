"""The devices that an engine computes on, and where its arrays lie on them.

On several devices a program runs on all of them at once (``shard_map``), each on its own parts of what is cut, and all
on the same of what is whole. Some may be another host's: then this process puts what its own devices have of an array,
launches every program that the others launch, in the same order, and reads what is whole.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import Array

from jaxcb.errors import ConfigError

AXIS = "tp"
"""The mesh's one axis."""
WHOLE, CUT = PartitionSpec(), PartitionSpec(AXIS)
"""Every device has all of an array; each has one row of it."""
PAGES = PartitionSpec(None, None, None, None, AXIS)
"""KV pages [N, L, 2, page_size, K, D]: each device has some heads."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """Devices of one engine. All its arrays lie on these, so that engines on other devices can run beside it.

    ``expert_parallel``: of a model with experts, each device has some, whole, in the place of a part of each.
    """

    devices: tuple[jax.Device, ...]
    witness: Callable[[tuple[Any, ...], Any], None] | None = None
    """Shown the path and the whole of every parameter that goes to the devices, cut or not, where there are several."""
    expert_parallel: bool = False

    @property
    def size(self) -> int:
        return len(self.devices)

    @property
    def own(self) -> list[tuple[int, jax.Device]]:
        """This process's devices, and which of all they are."""
        here = jax.process_index()
        return [(index, device) for index, device in enumerate(self.devices) if device.process_index == here]

    @property
    def is_here(self) -> bool:
        """All devices are this process's."""
        return len(self.own) == self.size

    @functools.cached_property
    def mesh(self) -> Mesh:
        return Mesh(np.array(self.devices), (AXIS,), axis_types=(AxisType.Auto,))

    def sharding(self, spec: PartitionSpec) -> Sharding:
        """Of an array. One device has all of everything."""
        return SingleDeviceSharding(self.devices[0]) if self.size == 1 else NamedSharding(self.mesh, spec)

    @functools.cached_property
    def whole(self) -> Sharding:
        """Every device has all of an array."""
        return self.sharding(WHOLE)

    def abstract(self, shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
        """An array of which every device has all."""
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=self.whole)

    def spread(self, function: Callable[..., Any], arguments: Any = WHOLE, results: Any = WHOLE) -> Callable[..., Any]:
        """``function`` on each device's parts; by itself on one device.

        Arguments:
            arguments, results: the partition of each, or one for all.
        """
        if self.size == 1:
            return function
        return jax.shard_map(function, mesh=self.mesh, in_specs=arguments, out_specs=results, check_vma=False)


def placement_of(devices: Sequence[jax.Device] | None, count: int, *, expert_parallel: bool = False) -> Placement:
    """``devices``, or the first ``count`` that there are.

    Raises:
        ConfigError: there are fewer, or others are given than are asked for.
    """
    if devices is not None:
        if len(devices) != count or len(set(devices)) != count:
            raise ConfigError(f"devices must name {count}, each once, got {list(devices)}", param="devices")
        return Placement(tuple(devices), expert_parallel=expert_parallel)
    there = _first(count, f"tensor_parallel_size {count}", "tensor_parallel_size")
    return Placement(tuple(there), expert_parallel=expert_parallel)


def groups_of(data_parallel_size: int, tensor_parallel_size: int) -> list[tuple[jax.Device, ...]]:
    """Devices for several engines, none in two groups.

    Raises:
        ConfigError: there are fewer.
    """
    size = tensor_parallel_size
    asked = f"data_parallel_size {data_parallel_size}" + (f" with tensor_parallel_size {size}" if size > 1 else "")
    there = _first(data_parallel_size * size, asked, "data_parallel_size")
    return [tuple(there[start : start + size]) for start in range(0, len(there), size)]


def _first(count: int, asked: str, param: str) -> list[jax.Device]:
    """So many of this process's devices.

    Raises:
        ConfigError: there are fewer than ``asked`` needs.
    """
    there = jax.local_devices()
    if len(there) < count:
        hint = ""
        if there[0].platform == "cpu":
            hint = f". A CPU counts as one; with JAX_NUM_CPU_DEVICES={count} in the environment as {count}"
        raise ConfigError(
            f"{asked} needs {count} devices, jax has {len(there)} ({there[0].device_kind}){hint}", param=param
        )
    return there[:count]


def on_device(values: Any, sharding: Sharding | None = None, *, may_alias: bool | None = False) -> Array:
    """An array that every device of the sharding has all of: a copy, which may be donated, unless it may be the same
    memory. It compiles nothing, as jnp.zeros and its like do, and asks no other process, as jax.device_put does."""
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(values, sharding, may_alias=may_alias)
    copies = [jax.device_put(values, device, may_alias=may_alias) for device in sharding.addressable_devices]
    return jax.make_array_from_single_device_arrays(values.shape, sharding, copies)
