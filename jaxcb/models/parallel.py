"""A decoder cut over N devices: what each has of every parameter, and how their results become one.

As in Megatron-LM (Shoeybi et al. 2019, section 3): each device has some of the heads and some of the MLP's features,
so that a layer adds up what the devices have twice, after ``o`` and after ``down``. The vocabulary is cut too: a token
is looked up by the device that has its row, and logits are put side by side.

A parameter that is cut has an axis of N before its own, and a device has one row of that:

    qkv     [N, (H + 2 K) D / N, E]   its queries, keys and values. Where N > K, N / K devices have the same head's
    o       [N, E, H D / N]           its inputs are the device's own heads
    gate_up [N, 2 F / N, E]           its gate, then its up
    down    [N, E, F / N]
    experts [N, X, 2 F / N, E], [N, X, E, F / N]        of every expert as of an MLP; or, with ``expert_parallel``,
            [N, X / N, 2 F, E], [N, X / N, E, F]        some experts, whole
    embedding, lm_head [N, V / N, E]  rows of 0 fill it up where N doesn't divide V
    biases  as their kernels' outputs; those of o and down, which are added once, lie on the first device, 0 elsewhere

Norms and routers are whole everywhere: every device knows the experts of every token, computes what it has of them, and
the sum after ``down`` joins the experts too. Devices of several hosts run programs that each host has compiled for
itself, and a last bit may choose another expert, or another token: they all take what the first device has chosen.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxcb.devices import AXIS, CUT, WHOLE
from jaxcb.errors import ConfigError
from jaxcb.models.experts import Choice
from jaxcb.models.params import Params, Path
from jaxcb.models.spec import ModelSpec


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """What the decoder asks of the other devices. Alone it changes nothing.

    ``in_order``: sums are taken from the first device to the last, so that a row has the same bits in any company. (An
    all-reduce may begin elsewhere for each part of an array.) ``expert_parallel``: each has some of the experts.
    ``apart``: some are other hosts', whose compiler may have chosen kernels that round differently.
    """

    size: int = 1
    vocab_size: int = 0
    in_order: bool = False
    expert_parallel: bool = False
    apart: bool = False

    def sum(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        """Over all devices."""
        if self.size == 1:
            return x
        if not self.in_order:
            return lax.psum(x, AXIS)
        first, *others = lax.all_gather(x, AXIS)
        return sum(others, start=first)

    def embed(self, table: Float[Array, "Vn E"], token_ids: Int[Array, "T"]) -> Float[Array, "T E"]:
        """Rows of the embedding."""
        if self.size == 1:
            return jnp.take(table, token_ids, axis=0, mode="clip")
        index = token_ids - lax.axis_index(AXIS) * table.shape[0]
        mine = (index >= 0) & (index < table.shape[0])
        return lax.psum(jnp.where(mine[:, None], jnp.take(table, index, axis=0, mode="clip"), 0), AXIS)

    def logits(self, part: Float[Array, "S Vn"]) -> Float[Array, "S V"]:
        """Those of the whole vocabulary."""
        return part if self.size == 1 else lax.all_gather(part, AXIS, axis=1, tiled=True)[:, : self.vocab_size]

    def agreed(self, choice: Choice) -> Choice:
        """The first device's, where others might choose other experts for a token, and then add up parts of different
        ones."""
        if not self.apart:
            return choice
        bits = jnp.concatenate([lax.bitcast_convert_type(choice.weights, jnp.int32), choice.experts], axis=1)
        weights, experts = jnp.split(self.first(bits), 2, axis=1)
        return Choice(lax.bitcast_convert_type(weights, jnp.float32), experts)

    def first(self, values: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
        """The first device's, where all should have the same and might not."""
        return lax.psum(jnp.where(lax.axis_index(AXIS) == 0, values, 0), AXIS) if self.apart else values

    def own_experts(self, experts: Int[Array, "T k"], num_experts: int) -> tuple[Int[Array, "T k"], int]:
        """Their numbers on this device, and how many it has; those of other devices are out of range."""
        if not self.expert_parallel:
            return experts, num_experts
        count = num_experts // self.size
        return experts - lax.axis_index(AXIS) * count, count

    def own(self, params: Params) -> Params:
        """A device's parameters as the decoder has them, out of what it has of the cut ones."""
        if self.size == 1:
            return params
        return jax.tree.map_with_path(lambda path, x: x[0] if _is_cut(_keys(path)) else x, params)


ALONE = TensorParallel()


def check_divides(spec: ModelSpec, size: int, *, expert_parallel: bool = False) -> None:
    """Raise ConfigError if a model can't be cut into so many parts; the message names the numbers."""
    if expert_parallel and not spec.num_experts:
        raise ConfigError(
            f"enable_expert_parallel is for models with experts, which this {spec.family} model has none of",
            param="enable_expert_parallel",
        )
    of_mlp = ("features of the MLP", spec.intermediate_size)
    if spec.num_experts:
        of_mlp = ("experts", spec.num_experts) if expert_parallel else ("features of an expert", spec.intermediate_size)
    for name, count in (("heads", spec.num_heads), of_mlp):
        if count % size:
            raise ConfigError(
                f"tensor_parallel_size must divide the model's {count} {name}, got {size}", param="tensor_parallel_size"
            )
    if spec.num_kv_heads % size and size % spec.num_kv_heads:
        raise ConfigError(
            f"tensor_parallel_size must divide the model's {spec.num_kv_heads} KV heads or be a multiple of them, got "
            f"{size}",
            param="tensor_parallel_size",
        )


def spec_of_part(spec: ModelSpec, size: int, *, expert_parallel: bool = False) -> ModelSpec:
    """The model that one of ``size`` devices computes; its vocabulary, from which ids are drawn, is whole, and so are
    its experts, which a token takes some of."""
    if size == 1:
        return spec
    return dataclasses.replace(
        spec,
        num_heads=spec.num_heads // size,
        num_kv_heads=max(1, spec.num_kv_heads // size),
        intermediate_size=spec.intermediate_size if expert_parallel else spec.intermediate_size // size,
    )


def partitions(params: Params) -> Any:
    """The partition of each parameter."""

    def partition(path: Any, _: Any) -> PartitionSpec:
        return CUT if _is_cut(_keys(path)) else WHOLE

    return jax.tree.map_with_path(partition, params)


def part_of(path: Path, array: Any, spec: ModelSpec, size: int, index: int, *, expert_parallel: bool = False) -> Any:
    """What device ``index`` has of a parameter (a numpy or jax array) that is cut; None if every device has all."""
    if not _is_cut(path):
        return None
    own, linear = spec_of_part(spec, size), path[-2]
    if expert_parallel and linear in ("gate_up", "down"):
        count = spec.num_experts // size
        return array[index * count : (index + 1) * count]
    if linear == "qkv":
        kv_start = index * spec.num_kv_heads // size * spec.head_dim
        starts = (index * own.q_size, spec.q_size + kv_start, spec.q_size + spec.kv_size + kv_start)
        return _rows(array, zip(starts, (own.q_size, own.kv_size, own.kv_size), strict=True))
    if linear == "gate_up":
        F, f = spec.intermediate_size, own.intermediate_size
        return _rows(array, ((index * f, f), (F + index * f, f)), axis=-2 if spec.num_experts else 0)
    if linear in ("o", "down"):
        if path[-1] == "bias":
            return array if index == 0 else 0 * array
        count = array.shape[-1] // size
        return array[..., index * count : (index + 1) * count]
    count = -(-spec.vocab_size // size)
    rows = array[index * count : (index + 1) * count]
    return _module(array).pad(rows, ((0, count - rows.shape[0]), (0, 0)))


def _rows(array: Any, pieces: Any, axis: int = 0) -> Any:
    before = (slice(None),) * (axis % array.ndim)
    return _module(array).concatenate([array[*before, start : start + count] for start, count in pieces], axis)


def _module(array: Any) -> Any:
    return jnp if isinstance(array, jax.Array) else np


def _is_cut(path: Path) -> bool:
    return path[-1] in ("kernel", "bias", "embedding") and "router" not in path


def _keys(path: Any) -> Path:
    return tuple(key.key for key in path)
