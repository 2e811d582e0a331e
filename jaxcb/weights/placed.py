"""Parameters on the devices of an engine: each device of this process is given its own parts, one parameter after the
other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jaxcb.devices import CUT, Placement, on_device
from jaxcb.errors import ConfigError
from jaxcb.models.parallel import check_divides, part_of, partitions
from jaxcb.models.spec import ModelSpec

Params = dict[str, Any]
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

    Raises:
        ConfigError: they are in as many parts as there are no devices, or the model can't be cut into so many.
    """
    table = params["embed"]["embedding"]
    if table.ndim == 3 and 0 in params["layers"]:  # in parts; those in panels have no numbered layers
        if len(table) != placement.size:
            raise ConfigError(
                f"the weights are cut into {len(table)} parts, and the engine has {placement.size} devices",
                param="tensor_parallel_size",
            )

        def there(array: Array, partition: PartitionSpec) -> Array:
            sharding = placement.sharding(partition)
            return array if array.sharding == sharding else jax.device_put(array, sharding)

        return jax.tree.map(there, params, partitions(params))
    flat = flatten_dict(params)
    if placement.size == 1 and all(array.sharding == placement.whole for array in flat.values()):
        return params
    place = placer(spec, placement)
    return unflatten_dict({path: place(path, array) for path, array in flat.items()})


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
