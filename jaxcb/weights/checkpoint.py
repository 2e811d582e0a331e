"""Orbax checkpoints of the params pytree: ready for the decoder, restored without fusing or transposing anything."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxcb.devices import Placement, placement_of
from jaxcb.errors import ModelError
from jaxcb.models import families
from jaxcb.models.parallel import check_divides
from jaxcb.models.params import insert, lookup
from jaxcb.models.spec import ModelSpec
from jaxcb.weights import hf_files
from jaxcb.weights.placed import placed
from jaxcb.weights.resolve import ORBAX_FOLDER, ModelFiles

_SMALL_FILES = ("*.json", "*.jinja")
_NOT_COPIED = ("model.safetensors.index.json", "config.json")


def save_orbax(files: ModelFiles, params: dict[str, Any], dtype: jnp.dtype, target: Path) -> None:
    """Write ``params`` and the small files of the model to the existing directory ``target``."""
    from orbax.checkpoint import v1 as ocp

    ocp.save(target / ORBAX_FOLDER, params)
    _copy_small_files(files, dtype, target)


def save_safetensors(
    files: ModelFiles, spec: ModelSpec, params: dict[str, Any], dtype: jnp.dtype, target: Path
) -> None:
    """Write ``params`` as a Hugging Face directory, fused arrays taken apart again."""
    layout: dict[str, tuple[str, tuple[int, ...]]] = {}
    for parameter in families.parameters(spec):
        code = hf_files.DTYPE_CODES["float32" if parameter.kind == "scale" else dtype.name]
        layout |= {source.name: (code, source.shape) for source in parameter.sources}

    def arrays() -> Iterator[np.ndarray]:
        for parameter in families.parameters(spec):
            array = np.asarray(lookup(params, parameter.path)).reshape(-1, *parameter.sources[0].shape[1:])
            start = 0
            for source in parameter.sources:
                end = start + source.shape[0]
                yield array[start:end]
                start = end

    hf_files.write_safetensors(target / "model.safetensors", layout, arrays())
    _copy_small_files(files, dtype, target)


def restore(directory: Path, spec: ModelSpec, dtype: jnp.dtype, placement: Placement | None = None) -> dict[str, Any]:
    """The params pytree of a converted directory, in ``dtype`` (norm scales float32), on the placement's devices or on
    the default one.

    Raises:
        ModelError: the checkpoint is damaged, or doesn't hold what ``spec`` describes.
    """
    from orbax.checkpoint import v1 as ocp

    path = (directory / ORBAX_FOLDER).absolute()  # orbax takes no other
    placement = placement_of(None, 1) if placement is None else placement
    apart = placement.size > 1  # each is given its parts then
    sharding = SingleDeviceSharding(jax.local_devices(backend="cpu")[0]) if apart else placement.whole
    check_divides(spec, placement.size, expert_parallel=placement.expert_parallel)
    expected: dict[str, Any] = {}
    for parameter in families.parameters(spec):
        kind = jnp.float32 if parameter.kind == "scale" else dtype
        insert(expected, parameter.path, jax.ShapeDtypeStruct(parameter.shape, kind, sharding=sharding))
    try:
        stored = ocp.metadata(path).metadata
    except Exception as error:  # orbax and tensorstore raise many kinds
        raise ModelError(f"{path} is not a readable Orbax checkpoint: {error}") from error
    _check_shapes(path, expected, stored)
    try:
        params = ocp.load(path, expected)
    except Exception as error:
        raise ModelError(f"{path} can't be restored: {error}") from error
    return placed(params, spec, placement) if apart else params


def _check_shapes(path: Path, expected: dict[str, Any], stored: Any) -> None:
    """Orbax cuts or pads an array whose shape differs from what is asked for; that must not happen silently."""
    given = {
        jax.tree_util.keystr(keys, simple=True, separator="."): leaf for keys, leaf in jax.tree.leaves_with_path(stored)
    }
    for keys, leaf in jax.tree.leaves_with_path(expected):
        name = jax.tree_util.keystr(keys, simple=True, separator=".")
        shape = getattr(given.get(name), "shape", None)
        if shape is None:
            raise ModelError(f"{path}: parameter {name} of shape {list(leaf.shape)} is missing")
        if tuple(shape) != leaf.shape:
            raise ModelError(
                f"{path}: parameter {name} has the shape {list(shape)}, expected {list(leaf.shape)} from config.json"
            )


def _copy_small_files(files: ModelFiles, dtype: jnp.dtype, target: Path) -> None:
    for pattern in _SMALL_FILES:
        for file in files.directory.glob(pattern):
            if file.name not in _NOT_COPIED:
                shutil.copyfile(file, target / file.name)
    config = json.loads((files.directory / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    hf_files.write_json(target / "config.json", config | {"dtype": dtype.name})
