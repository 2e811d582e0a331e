"""Memory for weights that a CPU computes with: one piece, in huge pages where the system has them.

A step on a CPU streams all weights. In pages of 4 KB, translating addresses then costs a step of few rows a tenth of
its time and more (bench/README.md, "Huge pages"). JAX computes with these arrays where they are.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Iterable

import numpy as np

_ALIGNMENT = 64  # bytes; XLA copies an array that lies otherwise


class Arena:
    """Hands out arrays from one piece of memory. It lives as long as one of them does.

    Arguments:
        shapes: of all arrays that will be asked for, in any order.
        dtype: of all of them.
    """

    def __init__(self, shapes: Iterable[tuple[int, ...]], dtype: np.dtype):
        self._dtype = np.dtype(dtype)
        size = sum(_aligned(math.prod(shape) * self._dtype.itemsize) for shape in shapes)
        self._memory = mmap.mmap(-1, max(1, size), **_PRIVATE)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux; a kernel without huge pages refuses, and small ones will do
            with contextlib.suppress(OSError):
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._used = 0

    def take(self, shape: tuple[int, ...]) -> np.ndarray:
        """An array of zeros.

        Raises:
            ValueError: more is asked for than was announced.
        """
        count = math.prod(shape)
        array = np.frombuffer(self._memory, self._dtype, count, offset=self._used).reshape(shape)
        self._used += _aligned(count * self._dtype.itemsize)
        return array


_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


__all__ = ["Arena"]
