"""Finds a model's shape: by the name of a preset, in a config.json on disk, or in one on the hub."""

from __future__ import annotations

import json
from pathlib import Path

from jaxcb.errors import ConfigError
from jaxcb.models.spec import ModelSpec
from jaxcb.sim.models import MODELS, ModelShape


def find_model(name: str) -> ModelShape:
    """
    Arguments:
        name: one of ``MODELS`` or the name of one ("8b", "Llama-3.1-8B"), a directory with a ``config.json`` or such a
            file, or a hub id (only its config is fetched).

    Raises:
        ConfigError: there is no such model.
        ModelError: its config can't be read.
    """
    for key, shape in MODELS.items():
        if name.lower() in (key, shape.name.lower()):
            return shape
    file = Path(name)
    if file.is_dir():
        file = file / "config.json"
    if not file.is_file():
        if name.count("/") != 1 or name.startswith((".", "/")):
            raise ConfigError(
                f"model must be one of {', '.join(MODELS)}, a directory with a config.json, or a hub id; got {name!r}",
                param="model",
            )
        file = _fetch(name)
    return shape_of(name.rstrip("/").rsplit("/", 1)[-1], _read(file))


def shape_of(name: str, spec: ModelSpec) -> ModelShape:
    """The numbers of a spec that decide how long its steps take."""
    return ModelShape(
        name,
        spec.num_params,
        spec.num_layers,
        spec.q_size,
        spec.kv_size,
        spec.hidden_size,
        spec.head_dim,
        spec.max_position,
        spec.num_expert_params,
        spec.expert_share,
    )


def _read(file: Path) -> ModelSpec:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read {file}: {error}", param="model") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} holds no object", param="model")
    return ModelSpec.from_hf_config(config)


def _fetch(hub_id: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(hub_id, "config.json"))
    except Exception as error:  # what the hub client raises has no common base
        raise ConfigError(f"can't fetch the config of {hub_id}: {error}", param="model") from error
