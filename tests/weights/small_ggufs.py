"""Writes small GGUF files from the small Hugging Face checkpoints, the way llama.cpp's converter does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from jaxcb.weights.gguf import _LAYER_NAMES, _TOP_NAMES

TOKENS = ["<s>", "</s>", "Ġ", "t", "h", "e", "Ġt", "he", "Ġthe", *"abcdfg", "Ċ"]
EXPERT_PARTS = dict(
    zip(
        ("w1", "w3", "w2", "gate_proj", "up_proj", "down_proj"),
        2 * ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
        strict=True,
    )
)
MERGES = ["Ġ t", "h e", "Ġt he"]


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Hugging Face [a0, a1, b0, b1] -> GGUF [a0, b0, a1, b1] for each head of 4 rows."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name: str) -> str:
    top = {hf: ours for ours, hf in _TOP_NAMES.items()}
    if name in top:
        return top[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{ {hf: ours for ours, hf in _LAYER_NAMES.items()}[part] }.{kind}".replace(" ", "")


def write_gguf(
    source: Path,
    target: Path,
    *,
    architecture: str,
    quantize: gguf.GGMLQuantizationType | None = None,
    edit: Callable[[gguf.GGUFWriter], Any] = lambda writer: None,
    vocabulary: bool = True,
) -> dict[str, np.ndarray]:
    """Write the checkpoint in ``source`` as a GGUF file; returns the weights by their Hugging Face names, as stored."""
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(target, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    if experts := config.get("num_experts", config.get("num_local_experts")):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size", config["intermediate_size"]))
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta", 10_000.0))
    if vocabulary:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(TOKENS)
        writer.add_token_types([3, 3, *[1] * (len(TOKENS) - 2)])
        writer.add_token_merges(MERGES)
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
    edit(writer)
    stored, experts_of = {}, {}
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in load_file(source / "model.safetensors").items():
        tensor = tensor.astype(np.float32)
        if match := re.fullmatch(r"model\.layers\.(\d+)\.\w+\.(?:experts\.(\d+)\.(\w+)|gate)\.weight", name):
            stored[name] = tensor
            if match[2] is None:
                writer.add_tensor(f"blk.{match[1]}.ffn_gate_inp.weight", tensor)
            else:
                experts_of.setdefault((match[1], EXPERT_PARTS[match[3]]), {})[int(match[2])] = tensor
            continue
        part = name.split(".")[-2]
        written = permute(tensor, heads[part]) if architecture == "llama" and part in heads else tensor
        if quantize is not None and tensor.ndim == 2:
            packed = gguf.quantize(written, quantize)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=quantize)
            written = gguf.dequantize(packed, quantize)
            back = written.reshape(heads[part], -1, 2, written.shape[1]).swapaxes(1, 2) if part in heads else written
            tensor = back.reshape(written.shape) if architecture == "llama" else written
        else:
            writer.add_tensor(gguf_name(name), written)
        stored[name] = tensor
    for (layer, part), tensors in experts_of.items():
        stacked = np.stack([tensors[expert] for expert in range(len(tensors))])
        writer.add_tensor(f"blk.{layer}.{part}.weight", stacked)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored
