"""Checks of arguments at trace time: a ValueError that names the argument, what was expected and what was given."""

from __future__ import annotations

import math
import numbers

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Shaped

BACKENDS = ("xla", "triton", "mosaic", "native")


def require(condition: bool, argument: str, expected: str, given: object) -> None:
    """Raise ValueError unless ``condition``."""
    if not condition:
        raise ValueError(f"{argument} must be {expected}, got {given}")


def require_is_array(array: object, argument: str) -> None:
    """Raise ValueError unless ``array`` has a shape and a dtype."""
    require(hasattr(array, "shape") and hasattr(array, "dtype"), argument, "an array", type(array).__name__)


def require_array(
    array: Shaped[Array, "..."], argument: str, shape: tuple[int | None, ...], *, dtypes: tuple[str, ...]
) -> None:
    """Raise ValueError unless ``array`` has the shape (None: any size) and one of the dtypes."""
    require_is_array(array, argument)
    fits = len(array.shape) == len(shape) and all(
        want in (None, got) for want, got in zip(shape, array.shape, strict=True)
    )
    sizes = ", ".join("any" if size is None else str(size) for size in shape)
    require(fits, argument, f"of shape [{sizes}]", f"shape {list(array.shape)}")
    require(jnp.dtype(array.dtype).name in dtypes, argument, f"of dtype {' or '.join(dtypes)}", f"{array.dtype}")


def require_dtype(dtype: DTypeLike, argument: str, dtypes: tuple[str, ...]) -> jnp.dtype:
    """The dtype, if it is one of these; raise ValueError otherwise."""
    try:
        name = jnp.dtype(dtype).name
    except TypeError:  # no dtype at all
        name = ""
    require(name in dtypes, argument, " or ".join(dtypes), repr(dtype))
    return jnp.dtype(name)


def require_number(value: object, argument: str, *, least: float = -math.inf, above: float = -math.inf) -> None:
    """Raise ValueError unless ``value`` is a finite number, at least ``least`` and above ``above``. It is static."""
    bounds = [f"{word} {bound:g}" for word, bound in (("at least", least), ("above", above)) if bound > -math.inf]
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    fits = is_number and value >= least and value > above  # type: ignore[operator]  # it is a number
    require(fits, argument, " ".join(["a finite number", *bounds]), repr(value))


def require_integer(value: object, argument: str, *, least: int = 1, nothing: str = "") -> None:
    """Raise ValueError unless ``value`` is an integer of at least ``least``. It is static. ``nothing``: what else it
    could have been, for the message."""
    fits = isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= least
    require(fits, argument, f"{nothing}an integer of at least {least}", repr(value))


def require_window(window: object) -> None:
    """Raise ValueError unless ``window`` is None or a number of positions."""
    if window is not None:
        require_integer(window, "window", nothing="None or ")


def require_page_size(page_size: int) -> None:
    """Raise ValueError unless ``page_size`` is a power of two that divides the backends' blocks."""
    require_integer(page_size, "page_size")
    require(page_size in (8, 16, 32, 64, 128), "page_size", "8, 16, 32, 64 or 128", page_size)
