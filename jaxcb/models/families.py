"""Where each parameter of the decoder comes from in a Hugging Face checkpoint: the name map of the families.

A new family is a :class:`~jaxcb.models.spec.ModelSpec` and, where its names or layouts differ, a branch here.
Nothing here reads files or imports jax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator
from typing import Literal

from jaxcb.models.params import Path
from jaxcb.models.spec import ModelSpec


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
        scale: one source, kept in float32 whatever the engine's dtype: scales of norms, and routers.

    ``num_experts``: what was stacked is the kernels of so many experts, one after the other: [num_experts, out, in].
    """

    path: Path
    kind: Literal["weight", "scale"]
    sources: tuple[Source, ...]
    num_experts: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array in the params pytree."""
        rows, *rest = sum(source.shape[0] for source in self.sources), *self.sources[0].shape[1:]
        return (rows, *rest) if self.num_experts is None else (self.num_experts, rows // self.num_experts, *rest)


def parameters(spec: ModelSpec, names: Container[str] = ()) -> Iterator[Parameter]:
    """Every parameter of the decoder that ``spec`` describes (layout: jaxcb/models/decoder.py), in file order.

    Arguments:
        names: of the checkpoint's tensors, where a family has several ways to name them: the experts of a layer may lie
            in one tensor, as transformers 5 keeps them in memory.
    """
    hidden = spec.hidden_size
    embedding = Source("model.embed_tokens.weight", (spec.vocab_size, hidden))
    yield Parameter(("embed", "embedding"), "weight", (embedding,))
    for layer in range(spec.num_layers):
        yield from _layer(spec, layer, names)
    yield Parameter(("final_norm", "scale"), "scale", (Source("model.norm.weight", (hidden,)),))
    if not spec.tie_word_embeddings:
        yield Parameter(("lm_head", "kernel"), "weight", (Source("lm_head.weight", (spec.vocab_size, hidden)),))


def _layer(spec: ModelSpec, layer: int, names: Container[str]) -> Iterator[Parameter]:
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
    if spec.num_experts:
        yield from _experts(spec, path, prefix, names)
        return
    yield from linear("gate_up", {"mlp.gate_proj": ffn, "mlp.up_proj": ffn}, hidden, spec.mlp_bias)
    yield from linear("down", {"mlp.down_proj": hidden}, ffn, spec.mlp_bias)


EXPERT_NAMES = {
    "mixtral": ("block_sparse_moe.", "w1", "w3", "w2"),
    "qwen3_moe": ("mlp.", "gate_proj", "up_proj", "down_proj"),
}
"""What stands before the experts and their router, and what gate, up and down are called."""


def _experts(spec: ModelSpec, path: Path, prefix: str, names: Container[str]) -> Iterator[Parameter]:
    count, hidden, ffn = spec.num_experts, spec.hidden_size, spec.intermediate_size
    block, gate, up, down = EXPERT_NAMES[spec.family]
    together = f"{prefix}mlp.experts."
    in_one = f"{together}down_proj" in names
    router = f"{prefix}{'mlp.' if in_one else block}gate.weight"
    yield Parameter((*path, "router", "kernel"), "scale", (Source(router, (count, hidden)),))
    if in_one:
        for name, outputs, inputs in (("gate_up", 2 * ffn, hidden), ("down", hidden, ffn)):
            source = Source(f"{together}{name}_proj", (count, outputs, inputs))
            yield Parameter((*path, name, "kernel"), "weight", (source,))
        return
    for name, parts, shape in (("gate_up", (gate, up), (ffn, hidden)), ("down", (down,), (hidden, ffn))):
        sources = tuple(
            Source(f"{prefix}{block}experts.{expert}.{part}.weight", shape) for expert in range(count) for part in parts
        )
        yield Parameter((*path, name, "kernel"), "weight", sources, count)
