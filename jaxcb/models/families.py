"""Where each parameter of the decoder comes from in a Hugging Face checkpoint: the name map of the families.

A new family is a :class:`~jaxcb.models.spec.ModelSpec` and, where its names or layouts differ, a branch here.
Nothing here reads files or imports jax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from jaxcb.models.spec import ModelSpec

Path = tuple[str | int, ...]
"""Keys that lead to a parameter in the nested dict, e.g. ("layers", 3, "qkv", "kernel")."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A tensor of the checkpoint: its name and the shape it must have there."""

    name: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One array of the params pytree and how it is made.

    ``kind``:
        weight: sources [out_i, ...] are stacked along their first axis: [sum of out_i, ...].
        scale: one source, kept in float32 whatever the engine's dtype.
    """

    path: Path
    kind: Literal["weight", "scale"]
    sources: tuple[Source, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array in the params pytree."""
        return (sum(source.shape[0] for source in self.sources), *self.sources[0].shape[1:])


def parameters(spec: ModelSpec) -> Iterator[Parameter]:
    """Every parameter of the decoder that ``spec`` describes (layout: jaxcb/models/decoder.py), in file order."""
    hidden = spec.hidden_size
    embedding = Source("model.embed_tokens.weight", (spec.vocab_size, hidden))
    yield Parameter(("embed", "embedding"), "weight", (embedding,))
    for layer in range(spec.num_layers):
        yield from _layer(spec, layer)
    yield Parameter(("final_norm", "scale"), "scale", (Source("model.norm.weight", (hidden,)),))
    if not spec.tie_word_embeddings:
        yield Parameter(("lm_head", "kernel"), "weight", (Source("lm_head.weight", (spec.vocab_size, hidden)),))


def _layer(spec: ModelSpec, layer: int) -> Iterator[Parameter]:
    hidden, ffn, heads = spec.hidden_size, spec.intermediate_size, spec.q_size
    prefix = f"model.layers.{layer}."
    path: Path = ("layers", layer)

    def norm(name: str, source: str, size: int) -> Parameter:
        return Parameter((*path, name, "scale"), "scale", (Source(f"{prefix}{source}.weight", (size,)),))

    def linear(name: str, sources: dict[str, int], inputs: int, bias: bool) -> Iterator[Parameter]:
        weights = tuple(Source(f"{prefix}{source}.weight", (size, inputs)) for source, size in sources.items())
        yield Parameter((*path, name, "kernel"), "weight", weights)
        if bias:
            biases = tuple(Source(f"{prefix}{source}.bias", (size,)) for source, size in sources.items())
            yield Parameter((*path, name, "bias"), "weight", biases)

    qkv = {"self_attn.q_proj": heads, "self_attn.k_proj": spec.kv_size, "self_attn.v_proj": spec.kv_size}
    yield norm("input_norm", "input_layernorm", hidden)
    yield from linear("qkv", qkv, hidden, spec.qkv_bias)
    if spec.qk_norm:
        yield norm("q_norm", "self_attn.q_norm", spec.head_dim)
        yield norm("k_norm", "self_attn.k_norm", spec.head_dim)
    yield from linear("o", {"self_attn.o_proj": hidden}, heads, spec.o_bias)
    yield norm("post_norm", "post_attention_layernorm", hidden)
    yield from linear("gate_up", {"mlp.gate_proj": ffn, "mlp.up_proj": ffn}, hidden, spec.mlp_bias)
    yield from linear("down", {"mlp.down_proj": hidden}, ffn, spec.mlp_bias)


def insert(params: dict[Any, Any], path: Path, value: Any) -> None:
    """Put ``value`` at ``path`` of the nested dict ``params``."""
    for key in path[:-1]:
        params = params.setdefault(key, {})
    params[path[-1]] = value


def lookup(params: dict[Any, Any], path: Path) -> Any:
    """The value at ``path`` of the nested dict ``params``."""
    value: Any = params
    for key in path:
        value = value[key]
    return value
