"""What a case of the compile report is, and what its shapes are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic import has_api
from pallas_kernels.triton.targets import TARGETS

Shape = jax.ShapeDtypeStruct
HEADS = {64: (9, 3), 80: (32, 32), 96: (24, 8), 128: (32, 8), 256: (8, 1)}
"""Query and KV heads of the models that have heads of that size."""


class Case(NamedTuple):
    """Something to compile.

    Arguments:
        arguments: their shapes.
        num_kernels: Pallas kernels in it.
        promised_bytes: most shared memory that the tile table says of a kernel, by its name.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    num_kernels: int = 1
    promised_bytes: dict[str, int] = {}  # noqa: RUF012  # nobody writes into it


def int32(*shape: int) -> Shape:
    return Shape(shape, jnp.int32)


def num_bytes(x: Shape) -> int:
    """Of an array of that shape."""
    return x.size * x.dtype.itemsize


def has_mosaic(target: str) -> bool:
    return TARGETS[target].compute_capability == (9, 0) and has_api()
