"""Checks of arguments at trace time: a ValueError that names the argument, what was expected and what was given."""

from __future__ import annotations

import math
import numbers

import jax.numpy as jnp
from jaxtyping import Array, Shaped

BACKENDS = ("xla", "triton", "mosaic", "native")


def require(condition: bool, argument: str, expected: str, given: object) -> None:
    """Raise ValueError unless ``condition``."""
    if not condition:
        raise ValueError(f"{argument} must be {expected}, got {given}")


def require_array(
    array: Shaped[Array, "..."], argument: str, shape: tuple[int | None, ...], *, dtypes: tuple[str, ...]
) -> None:
    """Raise ValueError unless ``array`` has the shape (None: any size) and one of the dtypes."""
    fits = len(array.shape) == len(shape) and all(
        want in (None, got) for want, got in zip(shape, array.shape, strict=True)
    )
    sizes = ", ".join("any" if size is None else str(size) for size in shape)
    require(fits, argument, f"of shape [{sizes}]", f"shape {list(array.shape)}")
    require(jnp.dtype(array.dtype).name in dtypes, argument, f"of dtype {' or '.join(dtypes)}", f"{array.dtype}")


def require_number(value: object, argument: str, *, least: float = -math.inf, above: float = -math.inf) -> None:
    """Raise ValueError unless ``value`` is a finite number, at least ``least`` and above ``above``. It is static."""
    bounds = [f"{word} {bound:g}" for word, bound in (("at least", least), ("above", above)) if bound > -math.inf]
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    fits = is_number and value >= least and value > above  # type: ignore[operator]  # it is a number
    require(fits, argument, " ".join(["a finite number", *bounds]), repr(value))


def require_page_size(page_size: int) -> None:
    """Raise ValueError unless ``page_size`` is a power of two that divides the backends' blocks."""
    require(page_size in (8, 16, 32, 64, 128), "page_size", "8, 16, 32, 64 or 128", page_size)
