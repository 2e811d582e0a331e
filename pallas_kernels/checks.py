"""Checks of arguments at trace time: a ValueError that names the argument, what was expected and what was given."""

from __future__ import annotations

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


def require_page_size(page_size: int) -> None:
    """Raise ValueError unless ``page_size`` is a power of two that divides the backends' blocks."""
    require(page_size in (8, 16, 32, 64, 128), "page_size", "8, 16, 32, 64 or 128", page_size)


def require_backend(backend: str, supported: tuple[str, ...] = BACKENDS) -> None:
    """Raise ValueError unless ``backend`` is one of the supported ones."""
    require(backend in supported, "backend", f"None or one of {', '.join(supported)}", repr(backend))
