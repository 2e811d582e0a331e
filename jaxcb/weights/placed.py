"""Parameters on the devices of an engine: each device of this process is given its own parts, one parameter after the
other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec, Sharding
from jaxtyping import Array

from jaxcb.devices import CUT, Placement, on_device
from jaxcb.errors import ConfigError
from jaxcb.models.parallel import check_divides, part_of, partitions
from jaxcb.models.params import Params, flatten, insert
from jaxcb.models.spec import ModelSpec
from jaxcb.weights.panels import are_panels

Place = Callable[[tuple[Any, ...], Any], Array]
"""Puts a parameter, given by its path and as a numpy or jax array, where it belongs. What lies there isn't copied."""


def placer(spec: ModelSpec, placement: Placement | None) -> Place:
    """How the parameters of a model are placed. No placement: on the default device, or where they lie.

    Raises:
        ConfigError: the model can't be cut into so many parts.
    """
    if placement is None or placement.size == 1:
        sharding = None if placement is None else placement.whole
        return lambda path, array: jax.device_put(array, sharding)
    check_divides(spec, placement.size, expert_parallel=placement.expert_parallel)
    return lambda path, array: _cut(path, array, spec, placement)


def placed(params: Params, spec: ModelSpec, placement: Placement) -> Params:
    """Parameters on the devices, whole or in parts as they may be. Those that lie there already stay as they are.

    Arguments:
        params: numpy or jax arrays.

    Raises:
        ConfigError: they are in as many parts as there are no devices, or in other ones than the placement wants; they
            are in panels, of which a device has all; or the model can't be cut into so many.
    """
    if are_panels(params):
        if placement.size > 1:
            raise ConfigError(
                f"the weights are in panels for the native CPU kernels, which can't be cut over {placement.size} "
                "devices: give them as they were before",
                param="tensor_parallel_size",
            )
    elif params["embed"]["embedding"].ndim == 3:  # in parts
        _check_parts(params, spec, placement)

        def there(array: Any, partition: PartitionSpec) -> Array:
            sharding = placement.sharding(partition)
            return array if _lies_on(array, sharding) else jax.device_put(array, sharding)

        return jax.tree.map(there, params, partitions(params))
    flat = dict(flatten(params))
    if placement.size == 1 and all(_lies_on(array, placement.whole) for array in flat.values()):
        return params
    place = placer(spec, placement)
    result: Params = {}
    for path, array in flat.items():
        insert(result, path, place(path, array))
    return result


def _lies_on(array: Any, sharding: Sharding) -> bool:
    return isinstance(array, jax.Array) and array.sharding == sharding


def _check_parts(params: Params, spec: ModelSpec, placement: Placement) -> None:
    """Raise ConfigError if parameters in parts are not those that the placement's devices take."""
    count, size = len(params["embed"]["embedding"]), placement.size
    if count != size:
        raise ConfigError(
            f"the weights are cut into {count} parts, and the engine has {size} devices", param="tensor_parallel_size"
        )
    if spec.num_experts:
        wanted = spec.num_experts // size if placement.expert_parallel else spec.num_experts
        if (given := params["layers"][0]["gate_up"]["kernel"].shape[1]) != wanted:
            raise ConfigError(
                f"each part of the weights has {given} of {spec.num_experts} experts, and enable_expert_parallel "
                f"{placement.expert_parallel} on {size} devices takes {wanted}: cut them alike",
                param="enable_expert_parallel",
            )


def _cut(path: tuple[Any, ...], array: Any, spec: ModelSpec, placement: Placement) -> Array:
    if placement.witness is not None:
        placement.witness(path, array)
    size, expert_parallel = placement.size, placement.expert_parallel
    parts = [
        jax.device_put(part[None], device)
        for index, device in placement.own
        if (part := part_of(path, array, spec, size, index, expert_parallel=expert_parallel)) is not None
    ]
    if not parts:
        return on_device(array, placement.whole, may_alias=None)
    shape = (size, *parts[0].shape[1:])
    return jax.make_array_from_single_device_arrays(shape, placement.sharding(CUT), parts)
