"""Models of published shapes, with random weights: nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.flax import save_file

from jaxcb.models import ModelSpec
from jaxcb.models.decoder import Params
from jaxcb.models.families import lookup, parameters

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
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
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
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
}
"""Of their config.json, what says their shape."""
_SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def config_of(model: str, *, small: bool) -> dict[str, Any]:
    """``small``: a model of the same family that any machine runs."""
    return {**CONFIGS[model], **(_SMALL if small else {})}


def spec_of(model: str, *, small: bool) -> ModelSpec:
    """See :func:`config_of`."""
    return ModelSpec.from_hf_config(config_of(model, small=small))


def save_weights(spec: ModelSpec, params: Params, folder: Path) -> None:
    """Write the decoder's parameters as checkpoints have them, a file for every parameter and an index of them all.

    Raises:
        OSError: no room is left.
    """
    names: dict[str, str] = {}
    for number, parameter in enumerate(parameters(spec)):
        array, file = lookup(params, parameter.path), f"model-{number:05}.safetensors"
        ends = np.cumsum([source.shape[0] for source in parameter.sources])[:-1].tolist()
        parts = np.split(np.asarray(array), ends)
        tensors = {source.name: part for source, part in zip(parameter.sources, parts, strict=True)}
        save_file(tensors, folder / file, metadata={"format": "pt"})  # type: ignore[arg-type]  # numpy arrays will do
        names |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
