"""Parameters in the layout that the native CPU kernels multiply in: made once, from rows or while a file is read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxcb.weights.memory import Arena
from pallas_kernels.native import panel_shape, to_panels

Params = dict[str, Any]
Path = tuple[Any, ...]


def in_panels(params: Params) -> Params:
    """The same model with everything that is multiplied in panels (pallas_kernels/native/panels.py), copied once into
    memory of its own; other arrays are shared. Params that have it already stay as they are."""
    flat = flatten_dict(params)
    kernels = {path: array for path, array in flat.items() if multiplied(path, tied="lm_head" not in params)}
    if all(array.ndim == 3 for array in kernels.values()):
        return params
    # Of one dtype, but where a caller holds others: the programs say what they can't multiply.
    shapes: dict[Any, list[tuple[int, ...]]] = {}
    for path, array in kernels.items():
        shapes.setdefault(array.dtype, []).append(panels_of(path, array.shape))
    arenas = {dtype: Arena(of_dtype, dtype) for dtype, of_dtype in shapes.items()}
    packs = {
        path: jax.device_put(packed(path, array, arenas[array.dtype]), array.sharding)
        for path, array in kernels.items()
    }
    return unflatten_dict(flat | packs)


def packed(path: Path, kernel: Any, arena: Arena) -> np.ndarray:
    """One kernel in panels, in memory of ``arena``. Shape and dtype are those that the arena was made for."""
    return to_panels(kernel, gated=_gated(path), out=arena.take(panels_of(path, kernel.shape)))


def multiplied(path: Path, *, tied: bool) -> bool:
    """Whether a parameter is a kernel. The embedding is, in a model without a head of its own."""
    return path == ("embed", "embedding") if path[0] == "embed" and tied else path[-1] == "kernel"


def panels_of(path: Path, shape: Iterable[int]) -> tuple[int, int, int]:
    """Shape of a kernel in panels, given its shape [out, in]."""
    return panel_shape(*shape, gated=_gated(path))


def _gated(path: Path) -> bool:
    return "gate_up" in path
