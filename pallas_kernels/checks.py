"""Checks of arguments at trace time: a ValueError that names the argument, what was expected and what was given."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped

KV_DTYPES = {
    "xla": ("float32", "bfloat16", "float16", "uint16"),
    "triton": ("float32", "bfloat16", "float16"),
    "native": ("float32", "bfloat16", "float16", "uint16"),
}
"""Page dtypes that a backend takes. uint16 holds the bits of bfloat16: XLA's CPU scatter into bfloat16 converts the
whole array to float32 and back, into uint16 it writes the rows alone."""


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


def require_kv_pages(
    kv_pages: Shaped[Array, "F page_size K D"], *, layer: int | Int32[Array, ""], num_layers: int, backend: str
) -> None:
    """Raise ValueError unless ``kv_pages`` is the flat view [N*L*2, page_size, K, D] of a pool of ``num_layers``."""
    require(backend in KV_DTYPES, "backend", f"None or one of {', '.join(KV_DTYPES)}", repr(backend))
    require_array(kv_pages, "kv_pages", (None, None, None, None), dtypes=KV_DTYPES[backend])
    require_page_size(kv_pages.shape[1])
    require(num_layers >= 1, "num_layers", "at least 1", num_layers)
    require(
        kv_pages.shape[0] % (2 * num_layers) == 0,
        "kv_pages",
        f"of a multiple of 2 * num_layers = {2 * num_layers} flat pages",
        f"{kv_pages.shape[0]} flat pages",
    )
    if not isinstance(layer, jax.Array):
        require(0 <= layer < num_layers, "layer", f"in [0, {num_layers})", layer)
