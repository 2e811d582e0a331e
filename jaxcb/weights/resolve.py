"""Finds what ``--model`` means: a directory, a hub id, a GGUF file, or nothing (the built-in model)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any, Literal

from jaxcb import cache
from jaxcb.errors import ModelError
from jaxcb.models.spec import ModelSpec
from jaxcb.weights import builtin, gguf
from jaxcb.weights.generation import sampling_defaults

ORBAX_FOLDER = "orbax"
"""Folder with the params of a directory that ``python -m jaxcb.weights convert`` wrote."""
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
"""Never pickles (.bin, .pt) and never code (.py)."""
_NOT_HUB_FILES = ["*/*", "consolidated*"]
"""Subfolders, and Mistral's second copy of the weights."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """A local directory with ``config.json``, the tokenizer's files, and weights in the given format."""

    name: str
    """What the model is called towards clients."""
    directory: Path
    format: Literal["safetensors", "orbax"]

    def read_spec(self) -> ModelSpec:
        """The model's description.

        Raises:
            ModelError: ``config.json`` is missing, damaged or describes something that isn't supported.
        """
        config = _read_json(self.directory / "config.json")
        try:
            return ModelSpec.from_hf_config(config, _read_generation_config(self.directory))
        except ModelError as error:
            raise ModelError(f"{self.directory}: {error}") from error

    def read_sampling_defaults(self, choice: str) -> dict[str, Any]:
        """Fields of SamplingParams by ``EngineConfig.generation_config``: "auto", "none" or another directory.

        Raises:
            ModelError: the directory has no ``generation_config.json``, or the file has impossible values.
        """
        if choice == "none":
            return {}
        directory = self.directory if choice == "auto" else Path(choice).expanduser()
        found = _read_generation_config(directory)
        if found is None and choice != "auto":
            raise ModelError(f"{directory} has no generation_config.json; other choices are auto and none")
        try:
            return sampling_defaults(found or {})
        except ModelError as error:
            raise ModelError(f"{directory}: {error}") from error


def resolve(model: str | os.PathLike[str] | None, revision: str | None = None) -> ModelFiles:
    """Find, fetch or convert the model that the user named.

    Arguments:
        model: a directory, a ``.gguf`` file, a hub id ``org/name``, or None for the built-in model.
        revision: branch, tag or commit of a hub id.

    Raises:
        ModelError: there is no such model; the message says what was tried.
    """
    if model is None:
        if revision is not None:
            raise ModelError(f"the built-in model has no revision {revision!r}: --revision goes with a hub id")
        return _directory(builtin.directory(), builtin.NAME)
    model = os.fspath(model)
    path = Path(model).expanduser()
    if not model.strip():
        raise ModelError("the model's name is empty; leave --model out for the built-in model")
    if path.is_dir():
        return _directory(path, path.resolve().name)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is a file, but not a .gguf file; --model takes a directory or a .gguf file")
        return _directory(_converted_gguf(path), path.stem)
    if path.suffix == ".gguf" or not _HUB_ID.fullmatch(model):
        raise ModelError(
            f"there is no model {model!r}: no such directory or file, and it isn't a hub id of the form org/name"
        )
    return _directory(_hub_snapshot(model, revision), model)


def _directory(path: Path, name: str) -> ModelFiles:
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} is not a model directory: it has no config.json")
    if (path / ORBAX_FOLDER).is_dir():
        return ModelFiles(name=name, directory=path, format="orbax")
    if any(path.glob("*.safetensors")):
        return ModelFiles(name=name, directory=path, format="safetensors")
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
    hint = f" ({pickles[0]} is a pickle, which is never loaded)" if pickles else ""
    raise ModelError(f"{path} holds no weights: expected *.safetensors or {ORBAX_FOLDER}/{hint}")


def _converted_gguf(path: Path) -> Path:
    """The file as a directory in the cache, converted once: path, size and time of change are the key."""
    path = path.resolve()
    status = path.stat()
    key = hashlib.sha256(f"{path}:{status.st_size}:{status.st_mtime_ns}".encode()).hexdigest()[:16]
    return cache.cached_dir(f"{path.stem}-{key}-1", lambda target: gguf.convert(path, target))


def _hub_snapshot(model: str, revision: str | None) -> Path:
    """The hub's files on this machine. huggingface_hub honours HF_HOME, HF_HUB_OFFLINE and HF_TOKEN."""
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(
                model, revision=revision, allow_patterns=_HUB_FILES, ignore_patterns=_NOT_HUB_FILES
            )
        )
    except Exception as error:  # its errors have no common base: HTTP, offline, not found, gated, full disk
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        at = f" at revision {revision!r}" if revision else ""
        raise ModelError(
            f"there is no directory {model!r} here, and the hub gave no model {model!r}{at}: {reason}"
        ) from error


def _read_generation_config(directory: Path) -> dict[str, Any] | None:
    file = directory / "generation_config.json"
    return _read_json(file) if file.is_file() else None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} can't be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} must hold a JSON object, got {type(value).__name__}")
    return value
