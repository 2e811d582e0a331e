"""Checks of arguments at trace time: a ValueError that names the argument, what was expected and what was given."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.metadata import Backend

KV_DTYPES = {"xla": ("float32", "bfloat16", "float16", "uint16"), "triton": ("float32", "bfloat16", "float16")}
"""Storage that a backend reads. uint16 holds the bits of bfloat16: XLA's CPU scatter into bfloat16 converts the whole
array to float32 and back, into uint16 it writes the rows."""


def require(condition: bool, argument: str, expected: str, given: object) -> None:
    """Raise ValueError unless ``condition``."""
    if not condition:
        raise ValueError(f"{argument} must be {expected}, got {given}")


def require_array(array: jax.Array, argument: str, shape: tuple[int | None, ...], *, dtypes: tuple[str, ...]) -> None:
    """Raise ValueError unless ``array`` has the shape (None: any size) and one of the dtypes."""
    fits = len(array.shape) == len(shape) and all(
        want is None or want == got for want, got in zip(shape, array.shape, strict=True)
    )
    wanted = ", ".join("any" if size is None else str(size) for size in shape)
    require(fits, argument, f"of shape [{wanted}]", f"shape {list(array.shape)}")
    require(jnp.dtype(array.dtype).name in dtypes, argument, f"of dtype {' or '.join(dtypes)}", array.dtype)


def require_backend(backend: str) -> None:
    """Raise ValueError unless ``backend`` is known."""
    require(backend in KV_DTYPES, "backend", f"None or one of {', '.join(KV_DTYPES)}", repr(backend))


def require_page_size(page_size: int) -> None:
    """Raise ValueError unless ``page_size`` is a power of two from 1 to 128."""
    require(page_size in (1, 2, 4, 8, 16, 32, 64, 128), "page_size", "a power of two from 1 to 128", page_size)


def require_kv_pages(kv_pages: jax.Array, *, layer: int, num_layers: int, backend: Backend) -> None:
    """Raise ValueError unless ``kv_pages`` can be the flat view [N*L*2, page_size, K, D] of a pool of ``num_layers``."""
    require_backend(backend)
    require_array(kv_pages, "kv_pages", (None, None, None, None), dtypes=KV_DTYPES[backend])
    require(num_layers >= 1, "num_layers", "at least 1", num_layers)
    require(0 <= layer < num_layers, "layer", f"in [0, {num_layers})", layer)
    require(
        kv_pages.shape[0] % (2 * num_layers) == 0,
        "kv_pages",
        f"the flat view with a multiple of 2 * num_layers = {2 * num_layers} pages",
        f"{kv_pages.shape[0]} pages",
    )
    require_page_size(kv_pages.shape[1])
