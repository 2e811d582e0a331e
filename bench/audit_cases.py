"""What bench.audit compiles: models by their published configs, full steps, and the least that these must move."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from bench.hlo import Traffic
from jaxcb.models.spec import ModelSpec
from jaxcb.step.buckets import Bucket
from pallas_kernels.triton.targets import TARGETS
from pallas_kernels.triton.work import LEAST_SPLIT, wanted_splits

MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "torch_dtype": "bfloat16",
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
}
"""Of their config.json, what the decoder reads."""
ITEM = 2
"""Bytes of a bfloat16."""


def spec_of(model: str, num_layers: int | None) -> ModelSpec:
    """``num_layers``: cut after so many; None: all."""
    config = MODELS[model]
    return ModelSpec.from_hf_config(config if num_layers is None else {**config, "num_hidden_layers": num_layers})


@dataclasses.dataclass(frozen=True)
class Case:
    """A step that fills its bucket: decodes that attend to ``context`` positions, and whole prompts of so many tokens.

    A mixed bucket decodes half of its sequences.
    """

    bucket: Bucket
    context: int

    @property
    def num_decodes(self) -> int:
        return (
            self.bucket.num_seqs if self.bucket.decode_only else min(self.bucket.num_seqs, self.bucket.num_tokens) // 2
        )

    @property
    def num_prompt_tokens(self) -> int:
        return self.bucket.num_tokens - self.num_decodes

    @property
    def kv_positions(self) -> int:
        """Positions whose KV attention reads, each once: of prompts every tile reads again, which caches serve."""
        return self.num_decodes * self.context + self.num_prompt_tokens


class Floor(NamedTuple):
    """Bytes that a step can't do without."""

    weights: float
    kv_read: float
    kv_written: float
    logits: float
    """Written by the head, read by the sampler."""
    activations: float
    """Between the kernels of a layer, each written and read once. Counted in mixed steps, and where the model is cut,
    since every device has all of the stream."""

    @property
    def total(self) -> float:
        return sum(self)


@dataclasses.dataclass(frozen=True)
class Experts:
    """Of a layer of one device."""

    there: int
    taken: float
    """By the tokens of a step, if they choose evenly and by themselves."""
    pairs: float
    """Of a token and an expert that it takes here, a token."""


def experts_of(spec: ModelSpec, num_tokens: int, num_devices: int = 1, *, expert_parallel: bool = False) -> Experts:
    """``spec``: what a device computes. A model without experts has one MLP, which all tokens take."""
    if not spec.num_experts:
        return Experts(1, 1.0, 1.0)
    k, X = spec.num_experts_per_token, spec.num_experts
    there = X // num_devices if expert_parallel else X
    return Experts(there, there * (1 - (1 - k / X) ** num_tokens), k * there / X)


def floor_of(
    spec: ModelSpec, case: Case, *, fast_norm: bool, num_devices: int = 1, expert_parallel: bool = False
) -> Floor:
    """Floor of a step, of one device: ``spec`` is what that computes, its part of the vocabulary included."""
    T = case.bucket.num_tokens
    experts = experts_of(spec, T, num_devices, expert_parallel=expert_parallel)
    router = 2 * spec.num_experts  # in float32
    layer = spec.hidden_size * (
        2 * spec.q_size + 2 * spec.kv_size + 3 * experts.taken * spec.intermediate_size + router
    )
    head = spec.vocab_size * spec.hidden_size
    position = spec.kv_bytes_per_token(ITEM)
    if num_devices > 1:
        written, read = _activations_of_part(spec, experts, decode_only=case.bucket.decode_only)
    else:
        written, read = (0, 0) if case.bucket.decode_only else _activations(spec, experts, fast_norm=fast_norm)
    return Floor(
        weights=ITEM * (spec.num_layers * layer + head),
        kv_read=case.kv_positions * position,
        kv_written=T * position,
        logits=2 * ITEM * case.bucket.num_seqs * spec.vocab_size,
        activations=ITEM * T * spec.num_layers * (written + read),
    )


def _activations(spec: ModelSpec, experts: Experts, *, fast_norm: bool) -> tuple[float, float]:
    """Elements a token and layer that the kernels write and read. They write x twice, normed x twice, qkv (keys and
    values go on into the pages), q, attention, gate and up, and their product."""
    E, F, H = spec.hidden_size, spec.intermediate_size, spec.q_size
    qkv = H + 2 * spec.kv_size
    written = 2 * E + qkv + H + H + experts.pairs * 3 * F + _results(spec, experts)
    read = written + 2 * E  # the residual stream once more, by the products that add to it
    norms = 2 * E
    if fast_norm:  # rotation and SiLU x up read x
        return written, read + norms
    return written + norms, read + norms


def _results(spec: ModelSpec, experts: Experts) -> float:
    """Of every expert of a token, before they are mixed."""
    return experts.pairs * spec.hidden_size if spec.num_experts else 0


def _activations_of_part(spec: ModelSpec, experts: Experts, *, decode_only: bool) -> tuple[float, float]:
    """The same where the model is cut. Twice a layer a product writes E, an all-reduce reads and writes it, and a norm
    reads it and the stream, and writes the stream and what the next product reads. Decodes write no rotated queries."""
    E, F, H = spec.hidden_size, spec.intermediate_size, spec.q_size
    both = 8 * E + (H + 2 * spec.kv_size) + (H if decode_only else 2 * H) + experts.pairs * 3 * F
    both += _results(spec, experts)
    return both, both


class Splits(NamedTuple):
    """How the decode kernel cuts a case's contexts."""

    entries: int
    """Rows of the array of partial results."""
    written: int
    """Those that are written, and read by the merge."""


def splits_of(spec: ModelSpec, case: Case, target: str) -> Splits:
    """As :func:`pallas_kernels.triton.work.decode_splits` does it."""
    wanted = wanted_splits(spec.num_kv_heads, TARGETS[target])
    length = max(-(-case.num_decodes * case.context // wanted), LEAST_SPLIT)
    a_row = -(-case.context // length)
    return Splits(wanted + case.bucket.num_seqs, case.num_decodes * a_row if a_row > 1 else 0)


def traffic_of(
    spec: ModelSpec,
    case: Case,
    target: str,
    num_pages: int,
    page_size: int,
    width: int,
    experts: Experts | None = None,
) -> list[Traffic]:
    """What data decides: which pages are read and written, which entries of the tables, which partial results, which
    experts are read and which of their rows written.

    Arguments:
        num_pages: of the pool, the trash page included.
        width: pages of a block table.
    """
    S, H, D, T = case.bucket.num_seqs, spec.num_heads, spec.head_dim, case.bucket.num_tokens
    pool = (num_pages * spec.num_layers * 2, page_size, spec.num_kv_heads, D)
    position = spec.kv_bytes_per_token(ITEM) / spec.num_layers
    decoded, prompts = case.num_decodes * case.context, case.num_prompt_tokens
    splits = splits_of(spec, case, target)
    entries, row = splits.entries, 4 * H
    decodes, prefills = "decode_attention", "ragged_paged_attention"
    q_row = ITEM * H * D
    heads, in_decodes = (T, H + 2 * spec.num_kv_heads, D), case.bucket.decode_only
    return [
        Traffic("rope_and_write_kv", pool, 0, T * position),
        # In a step of decodes attention takes the queries where the product has left them.
        Traffic("rope_and_write_kv", heads, T * (position + (0 if in_decodes else q_row)), 0),
        Traffic(decodes, heads, T * q_row, 0),
        Traffic(decodes, pool, decoded * position, 0),
        Traffic(decodes, (S, width), 4 * case.num_decodes * -(-case.context // page_size), 0),
        Traffic(decodes, (T, H, D), case.num_decodes * q_row, case.num_decodes * q_row),
        Traffic(decodes, (entries, H, D), 0, 2 * splits.written * row * D),
        Traffic(decodes, (entries, H), 0, 2 * splits.written * row),
        Traffic(prefills, pool, prompts * position, 0),
        Traffic(prefills, (S, width), 4 * -(-prompts // page_size), 0),
        Traffic(prefills, (T, H, D), prompts * q_row, prompts * q_row),
        *(_traffic_of_experts(spec, T, experts) if experts is not None and spec.num_experts else ()),
    ]


def _traffic_of_experts(spec: ModelSpec, num_tokens: int, experts: Experts) -> list[Traffic]:
    """Rows of others have their places in the arrays, and nobody computes them."""
    E, F, name = spec.hidden_size, spec.intermediate_size, "grouped_product"
    rows, part = num_tokens * spec.num_experts_per_token, experts.pairs * num_tokens * ITEM
    return [
        Traffic(name, (experts.there, 2 * F, E), experts.taken * 2 * F * E * ITEM, 0),
        Traffic(name, (experts.there, E, F), experts.taken * E * F * ITEM, 0),
        Traffic(name, (rows, 2 * F), 0, part * 2 * F),
        Traffic(name, (rows, F), part * F, 0),
        Traffic(name, (rows, E), 0, part * E),
    ]
