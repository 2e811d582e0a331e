"""The decoder: pre-norm attention and gated MLP with rotary positions, as in Llama, Mistral, Qwen2 and Qwen3; or
experts in the MLP's place, as in Mixtral and Qwen3-MoE.

Parameters are flax nnx modules, which say what exists, in which shape and how it is initialised. At load they are
split once into a plain nested dict of arrays, one entry a layer, which is what every jitted step takes: no nnx object
crosses a jit boundary. Weights are stored [out, in] as in checkpoints, q/k/v and gate/up fused;
the native CPU kernels take the same dict with its kernels in panels (jaxcb/weights/panels.py).

    {"embed": {"embedding": [V, E]}, "final_norm": {"scale": [E]}, "lm_head": {"kernel": [V, E]},   no lm_head if tied
     "layers": {0: {"input_norm": {"scale": [E]}, "qkv": {"kernel": [(H + 2K) D, E], "bias": [(H + 2K) D]},
                    "q_norm": {"scale": [D]}, "k_norm": {"scale": [D]}, "o": {"kernel": [E, H D]},
                    "post_norm": {"scale": [E]}, "gate_up": {"kernel": [2F, E]}, "down": {"kernel": [E, F]}}, 1: ...}}

Where a layer has X experts, these are {"router": {"kernel": float32 [X, E]}, "gate_up": {"kernel": [X, 2F, E]},
"down": {"kernel": [X, E, F]}}.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int

from jaxcb.models.attend import KV, Attend, LayerIndex
from jaxcb.models.experts import by_token, choose, expert_product, expert_scores, mixed, tokens_of
from jaxcb.models.norm import rms_norm
from jaxcb.models.parallel import ALONE, TensorParallel
from jaxcb.models.params import Params
from jaxcb.models.product import product
from jaxcb.models.rope import rope_tables, rotate
from jaxcb.models.spec import ModelSpec
from jaxcb.models.tiles import InTiles, directly
from pallas_kernels import group_rows
from pallas_kernels.platform import platform


class RMSNorm(nnx.Module):
    def __init__(self, size: int, eps: float):
        self.scale = nnx.Param(jnp.ones(size, jnp.float32))
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch N"]) -> Float[Array, "*batch N"]:
        return rms_norm(x, self.scale[...], self.eps)


class Linear(nnx.Module):
    def __init__(self, num_in: int, num_out: int, dtype: DTypeLike, rngs: nnx.Rngs, *, bias: bool = False):
        init = nnx.initializers.lecun_normal(in_axis=1, out_axis=0)
        self.kernel = nnx.Param(init(rngs.params(), (num_out, num_in), jnp.float32).astype(dtype))
        self.bias = nnx.Param(jnp.zeros(num_out, dtype)) if bias else None

    def __call__(self, x: Float[Array, "T I"]) -> Float[Array, "T O"]:
        y = product(x, self.kernel[...])
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)


class Router(nnx.Module):
    """Scores of the experts; float32 whatever the other weights are."""

    def __init__(self, spec: ModelSpec, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal(in_axis=1, out_axis=0)
        self.kernel = nnx.Param(init(rngs.params(), (spec.num_experts, spec.hidden_size), jnp.float32))

    def __call__(self, x: Float[Array, "T E"]) -> Float[Array, "T X"]:
        return expert_scores(x, self.kernel[...])


class Experts(nnx.Module):
    """One linear layer of every expert."""

    def __init__(self, num_experts: int, num_in: int, num_out: int, dtype: DTypeLike, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal(in_axis=2, out_axis=1, batch_axis=0)
        self.kernel = nnx.Param(init(rngs.params(), (num_experts, num_out, num_in), jnp.float32).astype(dtype))

    def __call__(
        self, x: Float[Array, "N I"], starts: Int[Array, "X_plus_1"], rows: Int[Array, "R"] | None = None
    ) -> Float[Array, "R O"]:
        return expert_product(x, self.kernel[...], starts, rows)


class Layer(nnx.Module):
    def __init__(self, spec: ModelSpec, dtype: DTypeLike, rngs: nnx.Rngs):
        E, F = spec.hidden_size, spec.intermediate_size
        self.input_norm = RMSNorm(E, spec.rms_norm_eps)
        self.qkv = Linear(E, spec.q_size + 2 * spec.kv_size, dtype, rngs, bias=spec.qkv_bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else None
        self.o = Linear(spec.q_size, E, dtype, rngs, bias=spec.o_bias)
        self.post_norm = RMSNorm(E, spec.rms_norm_eps)
        self.router = Router(spec, rngs) if spec.num_experts else None
        if spec.num_experts:
            self.gate_up: Callable[..., Array] = Experts(spec.num_experts, E, 2 * F, dtype, rngs)
            self.down: Callable[..., Array] = Experts(spec.num_experts, F, E, dtype, rngs)
        else:
            self.gate_up = Linear(E, 2 * F, dtype, rngs, bias=spec.mlp_bias)
            self.down = Linear(F, E, dtype, rngs, bias=spec.mlp_bias)


def _call(linear: Callable[..., Array], *arguments: Array) -> Array:
    return linear(*arguments)  # a plain function: jax would print a whole module to name a branch


def _scale(norm: RMSNorm) -> Float[Array, "N"]:
    return norm.scale[...]


class RolledLayer:
    """The layer whose number is known only when the program runs.

    Each part is a ``lax.switch`` over the layers' own arrays, which are read in place: nothing is stacked or sliced.
    Norms choose their small scale that way and are computed outside the switch.
    """

    def __init__(self, layers: Sequence[Layer], index: Int[Array, ""]):
        self._layers, self._index = layers, index
        self.input_norm = self._norm("input_norm")
        self.qkv = self._linear("qkv")
        self.q_norm = self._norm("q_norm") if layers[0].q_norm is not None else None
        self.k_norm = self._norm("k_norm") if layers[0].k_norm is not None else None
        self.o = self._linear("o")
        self.post_norm = self._norm("post_norm")
        self.router = self._linear("router") if layers[0].router is not None else None
        self.gate_up = self._linear("gate_up")
        self.down = self._linear("down")

    def _linear(self, name: str) -> Callable[..., Array]:
        branches = [functools.partial(_call, getattr(layer, name)) for layer in self._layers]
        return lambda *arguments: lax.switch(self._index, branches, *arguments)

    def _norm(self, name: str) -> Callable[[Array], Array]:
        norms: list[RMSNorm] = [getattr(layer, name) for layer in self._layers]
        scale = lax.switch(self._index, [functools.partial(_scale, norm) for norm in norms])
        return lambda x: rms_norm(x, scale, norms[0].eps)


def apply_layer(
    spec: ModelSpec,
    parts: Layer | RolledLayer,
    index: LayerIndex,
    x: Float[Array, "T E"],
    kv: KV,
    cos: Float[Array, "T half_D"],
    sin: Float[Array, "T half_D"],
    attend: Attend,
    in_tiles: InTiles = directly,
    parallel: TensorParallel = ALONE,
) -> tuple[Float[Array, "T E"], KV]:
    """One layer: x + attention(norm(x)), then x + mlp(norm(x))."""
    q, k, v = in_tiles(functools.partial(_queries_keys_values, spec, parts), x, cos, sin)
    kv, out = attend(index, kv, q, k, v)
    return in_tiles(functools.partial(_mix, spec, parts, parallel), x, out.reshape(x.shape[0], spec.q_size)), kv


def _queries_keys_values(
    spec: ModelSpec,
    parts: Layer | RolledLayer,
    x: Float[Array, "T E"],
    cos: Float[Array, "T half_D"],
    sin: Float[Array, "T half_D"],
) -> tuple[Float[Array, "T H D"], Float[Array, "T K D"], Float[Array, "T K D"]]:
    """What attention takes: queries and keys normalised (where the family does) and rotated."""
    T = x.shape[0]
    q, k, v = jnp.split(parts.qkv(parts.input_norm(x)), [spec.q_size, spec.q_size + spec.kv_size], -1)
    q = q.reshape(T, spec.num_heads, spec.head_dim)
    k = k.reshape(T, spec.num_kv_heads, spec.head_dim)
    v = v.reshape(T, spec.num_kv_heads, spec.head_dim)
    if parts.q_norm is not None and parts.k_norm is not None:
        q, k = parts.q_norm(q), parts.k_norm(k)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def _mix(
    spec: ModelSpec,
    parts: Layer | RolledLayer,
    parallel: TensorParallel,
    x: Float[Array, "T E"],
    attended: Float[Array, "T HD"],
) -> Float[Array, "T E"]:
    """What comes after attention: its projection, and the MLP."""
    x = x + parallel.sum(parts.o(attended))
    normed = parts.post_norm(x)
    if parts.router is None:
        gate, up = jnp.split(parts.gate_up(normed), 2, -1)
        return x + parallel.sum(parts.down(jax.nn.silu(gate) * up))
    choice = parallel.agreed(choose(spec, parts.router(normed)))
    groups = group_rows(*parallel.own_experts(choice.experts, spec.num_experts))
    gate, up = jnp.split(parts.gate_up(normed, groups.starts, tokens_of(groups, choice)), 2, -1)
    rows = by_token(parts.down(jax.nn.silu(gate) * up, groups.starts), groups, choice)
    return x + parallel.sum(mixed(rows, choice.weights).astype(x.dtype))


class Embedding(nnx.Module):
    """Token embeddings [V, E]; tied models use the same array as the head, which therefore is [V, E] everywhere."""

    def __init__(self, spec: ModelSpec, dtype: DTypeLike, rngs: nnx.Rngs):
        shape = (spec.vocab_size, spec.hidden_size)
        self.embedding = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), shape, jnp.float32).astype(dtype))


class Head(nnx.Module):
    def __init__(self, spec: ModelSpec, dtype: DTypeLike, rngs: nnx.Rngs):
        shape = (spec.vocab_size, spec.hidden_size)
        self.kernel = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), shape, jnp.float32).astype(dtype))


class Decoder(nnx.Module):
    def __init__(self, spec: ModelSpec, dtype: DTypeLike, rngs: nnx.Rngs):
        self.spec = spec
        self.embed = Embedding(spec, dtype, rngs)
        self.layers = nnx.List([Layer(spec, dtype, rngs) for _ in range(spec.num_layers)])
        self.final_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.lm_head = None if spec.tie_word_embeddings else Head(spec, dtype, rngs)

    def logits(self, hidden: Float[Array, "S E"]) -> Float[Array, "S V"]:
        head = self.embed.embedding[...] if self.lm_head is None else self.lm_head.kernel[...]
        return product(self.final_norm(hidden), head)


def param_shapes(spec: ModelSpec, dtype: DTypeLike) -> Params:
    """The parameters as a nested dict of ``jax.ShapeDtypeStruct``; nothing is allocated."""
    return nnx.to_pure_dict(_split(spec, jnp.dtype(dtype))[1])


def init_params(spec: ModelSpec, dtype: DTypeLike, seed: int = 0) -> Params:
    """Random parameters: for tests, benches and models that are to be trained."""
    return nnx.to_pure_dict(nnx.split(Decoder(spec, dtype, nnx.Rngs(seed)))[1])


def apply_layers(
    spec: ModelSpec,
    params: Params,
    token_ids: Int[Array, "T"],
    positions: Int[Array, "T"],
    kv: KV,
    attend: Attend,
    in_tiles: InTiles = directly,
    parallel: TensorParallel = ALONE,
) -> tuple[Float[Array, "T E"], KV]:
    """The residual stream after the last layer, before the final norm, and the updated ``kv``. Call it inside jit.

    On a GPU the layers are unrolled, so that the step has no control flow and becomes one CUDA graph. On a CPU they
    are rolled into a loop: a 30-layer step then compiles in a tenth of the time and computes the same bits. The
    stream is float32 there whatever the weights are, since products are fast with a float32 result only.

    Where the model is cut over several devices, ``spec`` and ``params`` are those of one part
    (:mod:`jaxcb.models.parallel`).
    """
    decoder = _merge(spec, params)
    cos, sin = in_tiles(functools.partial(rope_tables, spec.rope, spec.head_dim), positions)
    x = parallel.embed(decoder.embed.embedding[...], token_ids)
    if platform() == "cpu":
        return _rolled(decoder, x.astype(jnp.float32), kv, cos, sin, attend, in_tiles, parallel)
    for index, layer in enumerate(decoder.layers):
        x, kv = apply_layer(spec, layer, index, x, kv, cos, sin, attend, in_tiles, parallel)
    return x, kv


def _rolled(
    decoder: Decoder,
    x: Float[Array, "T E"],
    kv: KV,
    cos: Array,
    sin: Array,
    attend: Attend,
    in_tiles: InTiles,
    parallel: TensorParallel,
) -> tuple[Float[Array, "T E"], KV]:
    layers, spec = list(decoder.layers), decoder.spec

    def body(index: Int[Array, ""], carry: tuple[Array, KV]) -> tuple[Array, KV]:
        return apply_layer(spec, RolledLayer(layers, index), index, *carry, cos, sin, attend, in_tiles, parallel)

    return lax.fori_loop(0, spec.num_layers, body, (x, kv))


def apply_head(
    spec: ModelSpec,
    params: Params,
    hidden: Float[Array, "S E"],
    in_tiles: InTiles = directly,
    parallel: TensorParallel = ALONE,
) -> Float[Array, "S V"]:
    """Logits of the given rows of :func:`apply_layers`."""
    return parallel.logits(in_tiles(_merge(spec, params).logits, hidden))


@functools.lru_cache(maxsize=8)
def _split(spec: ModelSpec, dtype: np.dtype) -> tuple[nnx.GraphDef, nnx.State]:
    return nnx.split(nnx.eval_shape(lambda: Decoder(spec, dtype, nnx.Rngs(0))))


def _merge(spec: ModelSpec, params: Params) -> Decoder:
    graphdef, shapes = _split(spec, params["embed"]["embedding"].dtype)
    state = jax.tree.map(lambda shape: shape, shapes)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graphdef, state)
