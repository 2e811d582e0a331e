"""Writes tests/golden/tiny/<name>/: small random checkpoints and the logits that transformers computes from them.

Run by hand, in an environment of its own (the tests need neither torch nor this script)::

    pip install torch==2.13.0 transformers==5.24.0 safetensors
    python tests/golden/make_tiny.py [NAME ...]
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

OUT = Path(__file__).parent / "tiny"
NUM_PROMPT_IDS = 40
SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}

# Configs as they stand in config.json. Rope scaling is written with the keys of transformers 5 (rope_parameters) in
# some and with the older ones (rope_theta, rope_scaling, type) in others: both are in use.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_theta": 10_000.0},
    "llama_bias": {"model_type": "llama", "rope_theta": 500_000.0, "attention_bias": True, "mlp_bias": True},
    "llama_llama3": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama_yarn": {
        "model_type": "llama",
        "rope_theta": 10_000.0,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
    "llama_linear": {
        "model_type": "llama",
        "rope_theta": 10_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "mistral": {"model_type": "mistral", "rope_theta": 10_000.0, "sliding_window": 8},
    "qwen2": {
        "model_type": "qwen2",
        "rope_theta": 1_000_000.0,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "rope_theta": 1_000_000.0, "head_dim": 32, "tie_word_embeddings": True},
    "mixtral": {
        "model_type": "mixtral",
        "rope_theta": 1_000_000.0,
        "intermediate_size": 48,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "rope_theta": 1_000_000.0,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "qwen3_moe_plain": {
        "model_type": "qwen3_moe",
        "rope_theta": 1_000_000.0,
        "moe_intermediate_size": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "tie_word_embeddings": True,
    },
}

EXPERTS = {
    "mixtral": ("mlp", "block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"}),
    "qwen3_moe": ("mlp", "mlp", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}),
}
"""What transformers calls an MLP in memory and in files, and in files an expert's parts."""


def storage_dtype(model: str, tensor: str) -> torch.dtype:
    """bfloat16, but one checkpoint mixes three dtypes."""
    if model == "llama_bias":
        return torch.float32 if "norm" in tensor else torch.float16 if "mlp" in tensor else torch.bfloat16
    return torch.bfloat16


def random_weight(name: str, shape: torch.Size, tied: bool, generator: torch.Generator) -> torch.Tensor:
    """Weights that keep activations near 1, so that a wrong norm, bias, angle or window shows in the logits."""
    if "norm" in name:
        return torch.rand(shape, generator=generator) + 0.5
    if "embed_tokens" in name:
        return torch.randn(shape, generator=generator) * (0.3 if tied else 1.0)
    return torch.randn(shape, generator=generator) * (0.5 if name.endswith("bias") else shape[-1] ** -0.5)


def as_in_files(family: str, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The experts of a layer, which transformers 5 keeps in one tensor, under their names of before, one by one."""
    if family not in EXPERTS:
        return weights
    block, in_files, names = EXPERTS[family]
    found = {}
    for key, value in weights.items():
        prefix, _, part = key.replace(f".{block}.", f".{in_files}.").partition(".experts.")
        if not part:
            found[prefix] = value
            continue
        pieces = {"down": value}
        if part == "gate_up_proj":
            pieces = dict(zip(("gate", "up"), value.chunk(2, dim=1), strict=True))
        for name, piece in pieces.items():
            for number, expert in enumerate(piece):
                found[f"{prefix}.experts.{number}.{names[name]}.weight"] = expert.contiguous()
    return found


def write(name: str, config: dict[str, Any]) -> None:
    folder = OUT / name
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(SHAPE | config | {"dtype": "bfloat16"}, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")

    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    tied = empty.config.tie_word_embeddings
    weights = {
        key: random_weight(key, value.shape, tied, generator).to(storage_dtype(name, key))
        for key, value in sorted(empty.state_dict().items())
        if not (tied and key == "lm_head.weight")
    }
    save_file(as_in_files(config["model_type"], weights), folder / "model.safetensors", metadata={"format": "pt"})

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.randint(0, SHAPE["vocab_size"], (NUM_PROMPT_IDS,), generator=generator)
    with torch.no_grad():
        logits = model(ids[None]).logits[0]
    np.savez_compressed(
        folder / "logits.npz", ids=ids.numpy().astype(np.int32), logits=logits.numpy().astype(np.float32)
    )
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{name}: {size} bytes, logits from {logits.min():.2f} to {logits.max():.2f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for model_name in sys.argv[1:] or MODELS:
        write(model_name, MODELS[model_name])
