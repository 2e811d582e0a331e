"""The decoder on the native CPU kernels: five calls a layer, with norms, biases, activation and residual inside them
(six where there are experts, among which XLA sorts the rows).

The layers are a loop of which the program holds one turn: the kernels take the weights of all layers and the number of
the layer at hand. Rows of padding cost nothing, since the kernels know how many rows there are. The stream between the
calls is float32, whatever the weights are; products accumulate in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxcb.models.experts import by_token, choose, mixed, tokens_of
from jaxcb.models.params import Params
from jaxcb.models.rope import rope_tables
from jaxcb.models.spec import ModelSpec
from jaxcb.models.tiles import InTiles, directly
from pallas_kernels import group_rows, native
from pallas_kernels.pages import KVPages

Product = Callable[..., Float[Array, "T O"]]
MLP = Callable[[Float[Array, "T E"], Int[Array, ""]], Float[Array, "T E"]]
"""The stream and the number of a layer become the stream after its MLP."""


def apply_layers(
    spec: ModelSpec,
    params: Params,
    token_ids: Int[Array, "T"],
    positions: Int[Array, "T"],
    kv: KVPages,
    batch: native.Tables,
    in_tiles: InTiles = directly,
) -> tuple[Float[Array, "T E"], KVPages]:
    """As :func:`jaxcb.models.decoder.apply_layers`, attention and KV write included, of parameters in panels
    (jaxcb/weights/panels.py). Padding rows come out as 0.

    The kernels give a row the same bits in any company; ``in_tiles`` is for what XLA computes, the angles.
    """
    layers = params["layers"]
    num_rows = batch.query_starts[-1]
    cos, sin = in_tiles(functools.partial(rope_tables, spec.rope, spec.head_dim), positions)
    windows = jnp.asarray([window or 0 for window in spec.windows], jnp.int32)

    def product(name: str, num_outputs: int, norm: str | None = None) -> Product:
        part = layers[name]
        return functools.partial(
            native.product,
            kernels=part["kernel"],
            scales=part.get("scale"),
            biases=part.get("bias"),
            num_outputs=num_outputs,
            norms=None if norm is None else layers[norm]["scale"],
            eps=spec.rms_norm_eps,
            num_rows=num_rows,
        )

    E, F = spec.hidden_size, spec.intermediate_size
    qkv, o = product("qkv", spec.q_size + 2 * spec.kv_size, "input_norm"), product("o", E)
    if spec.num_experts:
        mlp = _experts(spec, layers, product("router", spec.num_experts, "post_norm"), num_rows, in_tiles)
    else:
        mlp = _mlp(product("gate_up", F, "post_norm"), product("down", E))
    q_norms, k_norms = (layers[name]["scale"] if spec.qk_norm else None for name in ("q_norm", "k_norm"))

    def one_layer(index: Int[Array, ""], carry: tuple[Array, KVPages]) -> tuple[Array, KVPages]:
        x, kv = carry
        attended, kv = native.place_and_attend(
            qkv(x, layer=index),
            cos,
            sin,
            kv,
            batch,
            layer=index,
            num_layers=spec.num_layers,
            eps=spec.rms_norm_eps,
            window=windows[index],
            q_norm=None if q_norms is None else q_norms[index],
            k_norm=None if k_norms is None else k_norms[index],
            order=native.order_of(kv),
        )
        x = o(attended, layer=index, residual=x)
        return mlp(x, index), kv

    embedding = params["embed"]["embedding"]
    if embedding.ndim == 3:
        x = native.take_rows(embedding, token_ids)
    else:
        x = jnp.take(embedding, token_ids, axis=0, mode="clip").astype(jnp.float32)
    return lax.fori_loop(0, spec.num_layers, one_layer, (x, kv))


def _mlp(gate_up: Product, down: Product) -> MLP:
    return lambda x, layer: down(gate_up(x, layer=layer, activation="silu"), layer=layer, residual=x)


def _experts(spec: ModelSpec, layers: Params, router: Product, num_rows: Int[Array, ""], in_tiles: InTiles) -> MLP:
    """``in_tiles`` is for what XLA computes here: the router's probabilities, and the sums of a token's experts."""

    def part(name: str, num_outputs: int, **norm: Any) -> Product:
        kernels, scales = layers[name]["kernel"], layers[name].get("scale")
        return functools.partial(
            native.grouped_product, kernels=kernels, scales=scales, num_outputs=num_outputs, **norm
        )

    norm = {"norms": layers["post_norm"]["scale"], "eps": spec.rms_norm_eps, "activation": "silu"}
    gate_up, down = part("gate_up", spec.intermediate_size, **norm), part("down", spec.hidden_size)

    def mlp(x: Float[Array, "T E"], layer: Int[Array, ""]) -> Float[Array, "T E"]:
        choice = in_tiles(functools.partial(choose, spec), router(x, layer=layer))
        is_token = jnp.arange(x.shape[0]) < num_rows
        groups = group_rows(jnp.where(is_token[:, None], choice.experts, spec.num_experts), spec.num_experts)
        inner = gate_up(x[tokens_of(groups, choice)], starts=groups.starts, layer=layer)
        rows = by_token(down(inner, starts=groups.starts, layer=layer), groups, choice)
        return in_tiles(lambda x, rows, weights: x + mixed(rows, weights), x, rows, choice.weights)

    return mlp


def apply_head(
    spec: ModelSpec, params: Params, hidden: Float[Array, "S E"], num_rows: Int[Array, ""]
) -> Float[Array, "S V"]:
    """Logits of the first ``num_rows`` rows; the others are 0."""
    head = params.get("lm_head", {"kernel": params["embed"]["embedding"]})
    return native.product(
        hidden,
        head["kernel"][None],
        num_outputs=spec.vocab_size,
        scales=head["scale"][None] if "scale" in head else None,
        norms=params["final_norm"]["scale"][None],
        eps=spec.rms_norm_eps,
        num_rows=num_rows,
    )
