"""Reads tensors of a Hugging Face checkpoint by name, whether it lies in one safetensors file or in shards."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import safetensors

from jaxcb.errors import ModelError
from jaxcb.models.families import Source

_DTYPES = ("F32", "F16", "BF16")
_MAX_MAPPED_BYTES = 64 << 20
"""A file is opened anew after so much was read from it: pages of a mapping stay in memory until it is closed."""


class SafetensorsSource:
    """The tensors of a checkpoint directory. Headers are read at once, the weights when they are asked for.

    Raises:
        ModelError: a file is missing, truncated or damaged.
    """

    def __init__(self, directory: Path):
        self._paths: dict[str, Path] = {}
        for path in _files(directory):
            self._paths |= dict.fromkeys(_open(path).keys(), path)
        self._opened: tuple[Path, safetensors.safe_open] | None = None
        self._mapped_bytes = 0

    @property
    def names(self) -> set[str]:
        return set(self._paths)

    def read(self, source: Source) -> np.ndarray:
        """The tensor's values as a new array, in the dtype it is stored in.

        Raises:
            ModelError: it is missing, or has another shape or dtype than a weight of this model can have.
        """
        path = self._paths.get(source.name)
        if path is None:
            raise ModelError(f"tensor {source.name} of shape {list(source.shape)} is missing from the checkpoint")
        tensor = self._file(path).get_slice(source.name)
        if tuple(tensor.get_shape()) != source.shape:
            raise ModelError(
                f"tensor {source.name} has the shape {tensor.get_shape()}, expected {list(source.shape)} "
                "from config.json"
            )
        if tensor.get_dtype() not in _DTYPES:
            raise ModelError(f"tensor {source.name} is stored as {tensor.get_dtype()}; supported: {', '.join(_DTYPES)}")
        array = tensor[:]
        self._mapped_bytes += array.nbytes
        return array

    def _file(self, path: Path) -> safetensors.safe_open:
        if self._opened is None or self._opened[0] != path or self._mapped_bytes > _MAX_MAPPED_BYTES:
            self._opened = (path, _open(path))
            self._mapped_bytes = 0
        return self._opened[1]


def _files(directory: Path) -> list[Path]:
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.is_file():
        return _shards(index)
    return [single] if single.is_file() else sorted(directory.glob("*.safetensors"))


def _shards(index: Path) -> list[Path]:
    """The files that the index names. A shard is a file beside it, never a path to somewhere else."""
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index} can't be read: expected a 'weight_map' of names to files ({error!r})") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(f"{index} names {name!r}, which is not a file beside it")
    return [index.parent / name for name in sorted(names)]


def _open(path: Path) -> safetensors.safe_open:
    try:
        return safetensors.safe_open(path, framework="numpy")
    except (OSError, safetensors.SafetensorError) as error:
        raise ModelError(f"{path} is not a readable safetensors file: {error}") from error
