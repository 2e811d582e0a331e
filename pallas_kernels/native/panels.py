"""Weights in panels: the layout in which the native kernels multiply, made from rows once, when a model is loaded.

A kernel [O, I] becomes [P, I, 16]: panel p holds outputs 16 p to 16 p + 15, an input's weights beside each other, so
that registers run along the outputs and nothing has to be packed in a step. Two bfloat16 lie in a word, outputs i and
i + 8 of a panel, and are widened by an operation each. Where the CPU multiplies bfloat16 itself, two inputs of an
output stand beside each other instead: [P, I / 2, 16, 2] in the same shape, a last input of an odd number alone. So the
layout is the loaded library's, and :func:`pallas_kernels.native.load` comes first.

Where 16 doesn't divide O, the last panel is filled up with zeros. The panels of a gated kernel, gate and up, take
turns: what belongs together lies in one run of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Int, Shaped

from pallas_kernels.native.library import loaded

PANEL = 16


def panel_shape(num_outputs: int, num_inputs: int, *, gated: bool = False) -> tuple[int, int, int]:
    """Shape of a kernel in panels. ``num_outputs`` counts gate and up."""
    panels = 2 * -(-num_outputs // 2 // PANEL) if gated else -(-num_outputs // PANEL)
    return panels, num_inputs, PANEL


def to_panels(kernel: Shaped[Any, "O I"], *, gated: bool = False, out: np.ndarray | None = None) -> np.ndarray:
    """A kernel in panels, of its dtype.

    Arguments:
        kernel: numpy's, or jax's on the CPU.
        gated: its first half are gates, its second half what they are multiplied with.
        out: zeros to fill, of :func:`panel_shape` and the kernel's dtype; None: a new array.

    Raises:
        ValueError: ``out`` is another one.
    """
    rows = np.asarray(kernel)
    shape = panel_shape(*rows.shape, gated=gated)
    if out is None:
        out = np.zeros(shape, rows.dtype)
    if (out.shape, out.dtype) != (shape, rows.dtype):
        raise ValueError(f"out must be {rows.dtype} {list(shape)}, got {out.dtype} {list(out.shape)}")
    halves = np.split(rows, 2) if gated else [rows]
    for index, half in enumerate(halves):
        # As plain integers: numpy copies other packages' dtypes one by one.
        panels, numbers = _integers(out[index :: len(halves)]), _integers(half)
        if _pairs_inputs(rows.dtype):
            even = rows.shape[1] // 2 * 2
            pairs = panels[:, :even].reshape(len(panels), even // 2, PANEL, 2)
            _fill(pairs, numbers[:, :even].reshape(len(numbers), even // 2, 2), range(PANEL))
            panels, numbers = panels[:, even:], numbers[:, even:]
            _fill(panels, numbers, range(PANEL))
        else:
            _fill(panels, numbers, _order(rows.dtype))
    return out


def _fill(panels: np.ndarray, rows: np.ndarray, order: Sequence[int]) -> None:
    """A few panels at a time, which stay in the cache meanwhile."""
    together = 8
    for first in range(0, len(panels), together):
        some = rows[first * PANEL : (first + together) * PANEL]
        for place, output in enumerate(order):
            column = some[output::PANEL]
            panels[first : first + len(column), :, place] = column


def take_rows(panels: Shaped[Array, "P I 16"], rows: Int[Array, "T"]) -> Float[Array, "T I"]:
    """Rows of a kernel that was put in panels, in float32, such as embeddings of tokens out of a head; numbers below 0
    or past the last one give some row."""
    if _pairs_inputs(panels.dtype):
        P, I, _ = panels.shape  # noqa: E741  # the letter of the shape
        even = I // 2 * 2
        pairs = panels[:, :even].reshape(P, even // 2, PANEL, 2)
        taken = pairs.at[rows // PANEL, :, rows % PANEL].get(mode="clip").reshape(-1, even)
        last = panels[:, even:].at[rows // PANEL, :, rows % PANEL].get(mode="clip")
        return jnp.concatenate([taken, last], 1).astype(jnp.float32)
    places = jnp.asarray(np.argsort(_order(panels.dtype)), jnp.int32)
    return panels.at[rows // PANEL, :, places[rows % PANEL]].get(mode="clip").astype(jnp.float32)


def _pairs_inputs(dtype: DTypeLike) -> bool:
    library = loaded()
    return jnp.dtype(dtype) == jnp.bfloat16 and library is not None and library.variant == "avx512_bf16"


def _order(dtype: DTypeLike) -> list[int]:
    """Which output of a panel stands where."""
    half = PANEL // 2
    paired = [output for first in range(half) for output in (first, first + half)]
    return paired if jnp.dtype(dtype) == jnp.bfloat16 else list(range(PANEL))


def _integers(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.dtype.itemsize}")
