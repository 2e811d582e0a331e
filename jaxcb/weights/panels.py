"""Parameters in the layout that the native CPU kernels multiply in: made once, from rows or while a file is read.

The layers of a part lie in one array, {"layers": {"qkv": {"kernel": [L, P, I, 16]}, ...}}, with the X experts of each,
[L, X, P, I, 16]: a step hands every array over by itself, and for six of each of thirty layers that took the host
longer than all else that it does in a step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jaxcb.errors import ModelError
from jaxcb.models.params import Params, Path, flatten, insert
from jaxcb.weights.memory import Arena
from pallas_kernels.native import panel_shape, to_panels


def are_panels(params: Params) -> bool:
    """They are in panels already: all layers of a part in one array, so that no layer has a number."""
    return 0 not in params["layers"]


def in_panels(params: Params) -> Params:
    """The same model with everything that is multiplied in panels (pallas_kernels/native/panels.py) and the layers of
    each part in one array, copied once into memory of its own; other arrays are shared. Params that have it already
    stay as they are.

    Raises:
        ModelError: layers have kernels of several dtypes.
    """
    if are_panels(params):
        return params
    rows = dict(flatten(params))
    panels = Panels({path: (array.shape, array.dtype) for path, array in rows.items()})
    for path, array in rows.items():
        panels.put(path, array)
    return panels.params(params["embed"]["embedding"].sharding)


class Panels:
    """Takes the parameters of a model as rows, in any order, and puts them in panels.

    Arguments:
        rows: shape and dtype of every parameter that will be :meth:`put`.
        owned: those that stay rows and are to lie beside the panels: see :meth:`room`.

    Raises:
        ModelError: layers have kernels of several dtypes.
    """

    def __init__(self, rows: Mapping[Path, tuple[tuple[int, ...], Any]], owned: Collection[Path] = ()):
        self._tied = ("lm_head", "kernel") not in rows
        self._num_layers = 1 + max(path[1] for path in rows if path[0] == "layers")
        self._flat: dict[Path, Any] = {}
        dtypes: dict[Path, np.dtype] = {}
        sizes: dict[np.dtype, list[tuple[int, ...]]] = {}
        for path, (shape, dtype) in rows.items():
            if not self._multiplied(path):
                if path in owned:
                    sizes.setdefault(np.dtype(dtype), []).append(shape)
                continue
            known = dtypes.setdefault(_place(path), np.dtype(dtype))
            if known != dtype:
                name = ".".join(map(str, path))
                raise ModelError(f"the native kernels need layers of one dtype, and {name} is {dtype}, not {known}")
            if path[0] != "layers" or path[1] == 0:
                sizes.setdefault(known, []).append(self._room_of(path, shape))
        self._arenas = {dtype: Arena(shapes, dtype) for dtype, shapes in sizes.items()}

    def room(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Memory beside the panels for the rows of a parameter that was announced as ``owned``."""
        return self._arenas[np.dtype(dtype)].take(shape)

    def put(self, path: Path, rows: Any) -> None:
        """One parameter, numpy's or jax's. What is neither a kernel nor a layer's is kept, not copied."""
        place, is_layer, kernel = _place(path), path[0] == "layers", self._multiplied(path)
        if not (is_layer or kernel):
            self._flat[place] = rows
            return
        if place not in self._flat:
            shape = self._room_of(path, rows.shape)
            self._flat[place] = self._arenas[rows.dtype].take(shape) if kernel else np.zeros(shape, np.float32)
        room = self._flat[place][path[1]] if is_layer else self._flat[place]
        if kernel:
            for one, its_room in zip(rows, room, strict=True) if rows.ndim == 3 else ((rows, room),):
                to_panels(one, gated=_gated(path), out=its_room)
        else:
            room[:] = rows

    def params(self, sharding: Sharding | None = None) -> Params:
        """The model, once everything is there. ``sharding``: of arrays that are not jax's yet."""
        params: Params = {}
        for path, array in self._flat.items():
            insert(params, path, array if isinstance(array, jax.Array) else jax.device_put(array, sharding))
        return params

    def _room_of(self, path: Path, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the array that a parameter goes into; layers share one."""
        shape = panels_of(path, shape) if self._multiplied(path) else shape
        return (self._num_layers, *shape) if path[0] == "layers" else shape

    def _multiplied(self, path: Path) -> bool:
        """Whether a parameter is a kernel. The embedding is, in a model without a head of its own."""
        return path == ("embed", "embedding") if path[0] == "embed" and self._tied else path[-1] == "kernel"


def panels_of(path: Path, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of a kernel in panels, given its shape, [out, in] or that of experts, [X, out, in]."""
    *experts, num_outputs, num_inputs = shape
    return (*experts, *panel_shape(num_outputs, num_inputs, gated=_gated(path)))


def _place(path: Path) -> Path:
    """Where a parameter stands in the result."""
    return path if path[0] != "layers" else (path[0], *path[2:])


def _gated(path: Path) -> bool:
    return "gate_up" in path
