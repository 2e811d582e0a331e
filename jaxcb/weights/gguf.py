"""Turns a GGUF file into a Hugging Face directory: config, weights, tokenizer, chat template."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxcb.errors import ModelError
from jaxcb.models.families import EXPERT_NAMES
from jaxcb.weights import gguf_tokenizer, hf_files
from jaxcb.weights.gguf_file import GGUFFile

_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
"""Model type of each. llama is a Mistral's too, which has a window, and a Mixtral's, which has experts."""
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_EXPERT_PARTS = {"ffn_gate_exps": 1, "ffn_up_exps": 2, "ffn_down_exps": 3}
"""The experts of a layer in one tensor; where :data:`jaxcb.models.families.EXPERT_NAMES` names the part."""
_ROPE_FACTORS = "rope_freqs.weight"


def convert(source: Path, target: Path) -> None:
    """Write the model in ``source`` to the existing directory ``target``, float16 and bfloat16 kept, the rest float32.

    Raises:
        ModelError: the file is damaged, or its architecture, tokenizer or a tensor isn't supported.
    """
    file = GGUFFile(source)
    try:
        config = _config(file)
        tokenizer, tokenizer_config = gguf_tokenizer.build(file.get)
    except ModelError as error:
        raise ModelError(f"{source}: {error}") from error
    tokenizer_config["model_max_length"] = config["max_position_embeddings"]
    _write_weights(file, config, target / "model.safetensors")
    hf_files.write_json(target / "config.json", config)
    hf_files.write_json(target / "generation_config.json", _generation_config(file))
    hf_files.write_json(target / "tokenizer_config.json", tokenizer_config)
    tokenizer.save(str(target / "tokenizer.json"))
    if template := file.get("tokenizer.chat_template"):
        (target / "chat_template.jinja").write_text(template, encoding="utf-8")


def _config(file: GGUFFile) -> dict[str, Any]:
    """The ``config.json`` that describes the same model."""
    architecture = file.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ModelError(f"architecture {architecture!r} is not supported; supported: {', '.join(_ARCHITECTURES)}")

    def value(key: str, default: Any = None) -> Any:
        return file.get(f"{architecture}.{key}", default)

    def need(key: str) -> int:
        number = value(key)
        if not isinstance(number, int):
            raise ModelError(f"{architecture}.{key} must be an integer, got {number!r}")
        return number

    heads, hidden = need("attention.head_count"), need("embedding_length")
    head_dim = value("attention.key_length", hidden // max(heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if value(key, head_dim) != head_dim:
            raise ModelError(f"{architecture}.{key} must equal the head size {head_dim}, got {value(key)}")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError("tensor token_embd.weight is missing")
    window = value("attention.sliding_window")
    num_experts, model_type = value("expert_count", 0), _ARCHITECTURES[architecture]
    if architecture == "llama":
        model_type = "mixtral" if num_experts else "mistral" if window else "llama"
    if bool(num_experts) != (model_type in EXPERT_NAMES):
        raise ModelError(f"{architecture} with {num_experts} experts is not supported")
    config = {
        "architectures": [_CLASSES[model_type]],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": need("context_length"),
        # GGUF stores float32: 1e-05 comes back as 9.999999747378752e-06.
        "rms_norm_eps": float(f"{value('attention.layer_norm_rms_epsilon', 1e-5):.6g}"),
        "rope_parameters": _rope(file, value, head_dim),
        "hidden_act": "silu",
        "attention_bias": architecture == "llama" and "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": architecture == "llama" and "blk.0.ffn_up.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": "float32",
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id"),
    }
    if model_type in ("mistral", "mixtral"):
        config["sliding_window"] = window
    if model_type == "mixtral":
        config |= {"num_local_experts": num_experts, "num_experts_per_tok": need("expert_used_count")}
    if model_type == "qwen3_moe":
        config |= {"num_experts": num_experts, "num_experts_per_tok": need("expert_used_count")}
        config |= {"moe_intermediate_size": need("expert_feed_forward_length"), "norm_topk_prob": True}
    return config


def _rope(file: GGUFFile, value: Any, head_dim: int) -> dict[str, Any]:
    theta = float(value("rope.freq_base", 10_000.0))
    kind = value("rope.scaling.type", "none")
    original = value("rope.scaling.original_context_length")
    rope: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    if _ROPE_FACTORS in file.tensors:
        return rope | _llama3_rope(file.read(_ROPE_FACTORS).astype(np.float64), theta, head_dim)
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": float(value("rope.scaling.factor", 1.0))}
        if original:
            rope["original_max_position_embeddings"] = original
    elif kind != "none":
        raise ModelError(f"rope.scaling.type {kind!r} is not supported; supported: none, linear, yarn")
    return rope


def _llama3_rope(factors: Float[np.ndarray, " half_dim"], theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3.1 and later: GGUF holds a divisor for each frequency instead of the four numbers they come from.

    All published models were scaled from 8,192 positions with low and high factors 1 and 4, so the largest divisor is
    the missing number. The divisors are computed again to be sure.
    """
    factor, low, high, original = float(factors.max()), 1.0, 4.0, 8192
    turns = original * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise ModelError(f"the frequency factors in {_ROPE_FACTORS} are not those of a Llama 3 model scaled from 8192")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _generation_config(file: GGUFFile) -> dict[str, Any]:
    """End tokens: end of text and, where the file names another one, end of turn."""
    ends = [file.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    config = {
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": sorted({end for end in ends if end is not None}),
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id"),
    }
    return {key: value for key, value in config.items() if value not in (None, [])}


def _write_weights(file: GGUFFile, config: dict[str, Any], path: Path) -> None:
    family = config["model_type"]
    layout: dict[str, tuple[str, tuple[int, ...]]] = {}
    names = [name for name in file.tensors if name != _ROPE_FACTORS]
    for name in names:
        shape, kind = file.tensors[name].shape, file.type_name(name)
        hf_names = _hf_names(file, name, family)
        of_each = shape[1:] if name.split(".")[-2] in _EXPERT_PARTS else shape
        layout |= dict.fromkeys(hf_names, (kind if kind in ("F16", "BF16") else "F32", of_each))
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    is_llama = family in ("llama", "mistral", "mixtral")

    def arrays() -> Iterator[np.ndarray]:
        for name in names:
            tensor = file.read(name)
            part = name.split(".")[-2]
            if is_llama and part in heads:
                tensor = _unpermute(tensor, heads[part])
            yield from tensor if part in _EXPERT_PARTS else [tensor]

    hf_files.write_safetensors(path, layout, arrays())


def _hf_names(file: GGUFFile, name: str, family: str) -> list[str]:
    """Of one tensor, or of every expert that it holds."""
    if name in _TOP_NAMES:
        return [_TOP_NAMES[name]]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is not None and match[2] in _LAYER_NAMES:
        return [f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"]
    if match is not None and match[3] == "weight" and family in EXPERT_NAMES:
        names = EXPERT_NAMES[family]
        block = f"model.layers.{match[1]}.{names[0]}"
        if match[2] == "ffn_gate_inp":
            return [f"{block}gate.weight"]
        if match[2] in _EXPERT_PARTS and len(file.tensors[name].shape) == 3:
            part = names[_EXPERT_PARTS[match[2]]]
            return [f"{block}experts.{expert}.{part}.weight" for expert in range(file.tensors[name].shape[0])]
    raise ModelError(f"{file.path}: tensor {name} is not part of a supported architecture")


def _unpermute(weight: Float[np.ndarray, "rows ..."], num_heads: int) -> Float[np.ndarray, "rows ..."]:
    """llama.cpp keeps the two halves of a rotary pair next to each other, Hugging Face half a head apart.

    One head of 4 rows: GGUF [a0, b0, a1, b1] -> HF [a0, a1, b0, b1], where (a_i, b_i) rotate together.
    """
    if weight.shape[0] % (2 * num_heads):
        raise ModelError(f"a q or k weight of {weight.shape[0]} rows can't be split into {num_heads} heads")
    pairs = weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)
