"""The devices that an engine computes on, and where its arrays lie on them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import Array

from jaxcb.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Placement:
    """Devices of one engine. All its arrays lie on these, so that engines on other devices can run beside it."""

    devices: tuple[jax.Device, ...]

    @functools.cached_property
    def whole(self) -> Sharding:
        """Every device has all of an array."""
        return SingleDeviceSharding(self.devices[0])

    def put(self, arrays: Any) -> Any:
        """A tree of arrays of which every device has all; those that lie so already are taken as they are."""
        return jax.tree.map(lambda x: x if x.sharding == self.whole else jax.device_put(x, self.whole), arrays)

    def abstract(self, shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
        """An array of which every device has all."""
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=self.whole)


def placement_of(devices: Sequence[jax.Device] | None, count: int) -> Placement:
    """``devices``, or the first ``count`` that there are.

    Raises:
        ConfigError: there are fewer, or others are given than are asked for.
    """
    if devices is not None:
        if len(devices) != count or len(set(devices)) != count:
            raise ConfigError(f"devices must name {count}, each once, got {list(devices)}", param="devices")
        return Placement(tuple(devices))
    there = jax.local_devices()
    if len(there) < count:
        hint = ""
        if there[0].platform == "cpu":
            hint = f". A CPU counts as one; with JAX_NUM_CPU_DEVICES={count} in the environment as {count}"
        raise ConfigError(
            f"tensor_parallel_size {count} needs {count} devices, jax has {len(there)} ({there[0].device_kind}){hint}",
            param="tensor_parallel_size",
        )
    return Placement(tuple(there[:count]))


def on_device(values: np.ndarray, sharding: Sharding | None = None) -> Array:
    """A copy, which may be donated. It compiles nothing, as jnp.zeros and its like do."""
    return jax.device_put(values, sharding, may_alias=False)
