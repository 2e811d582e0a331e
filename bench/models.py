"""Models of published shapes, with random weights: nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.flax import save_file

from bench.audit_cases import MODELS
from jaxcb.models import ModelSpec
from jaxcb.models.families import parameters
from jaxcb.models.params import Params, lookup

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
    return {**MODELS[model], **(_SMALL if small else {})}


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
        parts = np.split(np.asarray(array).reshape(-1, *parameter.sources[0].shape[1:]), ends)
        tensors = {source.name: part for source, part in zip(parameter.sources, parts, strict=True)}
        save_file(tensors, folder / file, metadata={"format": "pt"})  # type: ignore[arg-type]  # numpy arrays will do
        names |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
