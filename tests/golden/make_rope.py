"""Writes tests/golden/rope.json: rotary frequencies that transformers computes from configs, old keys and new ones.

Run by hand, in an environment of its own (the tests need neither torch nor this script)::

    pip install torch==2.13.0 transformers==5.24.0
    python tests/golden/make_rope.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

OUT = Path(__file__).parent / "rope.json"
SHAPE = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"rope_theta": 10_000.0},
    "another theta": {"rope_theta": 500_000.0},
    "theta nested": {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
    "linear": {"rope_theta": 10_000.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "linear, old key": {"rope_theta": 500_000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": {"rope_theta": 500_000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "llama3, old key": {"rope_theta": 10_000.0, "rope_scaling": {"type": "llama3", **LLAMA3}},
    "llama3, nested": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500_000.0, **LLAMA3}},
    "yarn": {"rope_theta": 10_000.0, "rope_scaling": {"rope_type": "yarn", **YARN}},
    "yarn, old key": {"rope_theta": 500_000.0, "rope_scaling": {"type": "yarn", **YARN}},
    "yarn, nested": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10_000.0, **YARN}},
    "yarn of the whole context": {"rope_theta": 10_000.0, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "yarn with a factor of its own": {
        "rope_theta": 10_000.0,
        "rope_scaling": {"rope_type": "yarn", **YARN, "attention_factor": 1.25},
    },
    "yarn with other betas": {
        "rope_theta": 10_000.0,
        "rope_scaling": {"rope_type": "yarn", **YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    },
    "yarn untruncated": {"rope_theta": 10_000.0, "rope_scaling": {"rope_type": "yarn", **YARN, "truncate": False}},
}


def case(config: dict[str, Any]) -> dict[str, Any]:
    """The config, and what transformers makes of it."""
    known = AutoConfig.for_model(**SHAPE | config)
    rope = LlamaRotaryEmbedding(known)
    return {"config": config, "frequencies": rope.inv_freq.tolist(), "attention_scaling": float(rope.attention_scaling)}


if __name__ == "__main__":
    cases = {name: case(config) for name, config in CONFIGS.items()}
    OUT.write_text(json.dumps({"shape": SHAPE, "cases": cases}) + "\n", encoding="utf-8")
    print(f"{OUT}: {len(cases)} configs, {OUT.stat().st_size} bytes")
