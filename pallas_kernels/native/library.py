"""The loaded library of this process: found or built, registered with XLA, and tested before anything uses it."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.native.build import NativeError, build, cpu_variants, library

logger = logging.getLogger(__name__)

TARGETS = ("jaxcb_product", "jaxcb_attention", "jaxcb_place_and_attend", "jaxcb_untouched")


class Library(NamedTuple):
    variant: str
    path: Path


_lock = threading.Lock()
_loaded: Library | None = None
_failure: NativeError | None = None


def loaded() -> Library | None:
    """What :func:`load` has loaded."""
    return _loaded


def load(directory: Path) -> Library:
    """Load the kernels for this CPU, compiled into ``directory`` if they aren't there. Once a process; it is safe to
    call it again.

    Raises:
        NativeError: they can't be used here. A second call raises the same without another attempt.
    """
    global _loaded, _failure
    with _lock:
        if _failure is not None:
            raise _failure
        if _loaded is None:
            try:
                _loaded = _load(directory)
            except NativeError as error:
                _failure = error
                raise
        return _loaded


def _load(directory: Path) -> Library:
    if jax.default_backend() != "cpu":
        raise NativeError(f"jax runs on {jax.default_backend()}, the native kernels run on CPUs")
    variants = cpu_variants()
    if not variants:
        raise NativeError("this CPU has neither AVX2 with FMA nor NEON")
    variant = variants[0]
    if not library(directory, variant).is_file():
        logger.warning("building the native CPU kernels (%s) into %s, once", variant, directory)
    start_s = time.monotonic()
    path = build(directory, variant)
    try:
        shared = ctypes.CDLL(str(path))
        for name in TARGETS:
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(shared, name)), platform="cpu")
    except (OSError, AttributeError) as error:
        raise NativeError(f"{path} can't be loaded: {error}. Remove it, and it is built anew") from error
    _self_test(path)
    logger.info("native CPU kernels (%s) ready after %.1f s", variant, time.monotonic() - start_s)
    return Library(variant, path)


def _self_test(path: Path) -> None:
    """Products and an attention of a few numbers, as XLA calls them, against numpy.

    Raises:
        NativeError: they differ.
    """
    from pallas_kernels.native import ops, panels

    rng = np.random.default_rng(0)
    x, weights = rng.standard_normal((3, 21), np.float32), rng.standard_normal((13, 21), np.float32)
    pages = rng.standard_normal((4, 8, 1, 16), np.float32)
    q = rng.standard_normal((1, 2, 16), np.float32)

    halves = weights.astype(jnp.bfloat16)  # their panels have an order of their own

    @jax.jit
    def every(x, kernels, q, pages):
        tables = ops.Tables(jnp.array([0, 1]), jnp.array([11]), jnp.array([[1, 0]]))
        products = [ops.product(x, kernel[None], num_outputs=13) for kernel in kernels]
        return *products, ops.attention(q, pages, tables, layer=0, num_layers=1)

    found = every(x, [panels.to_panels(kernel) for kernel in (weights, halves)], q, pages)
    product, halved, attended = (np.asarray(y) for y in found)
    keys, values = (np.concatenate([pages[2 + i], pages[i]])[:11, 0] for i in (0, 1))
    scores = np.exp(q[0] @ keys.T / 4)
    wanted = scores @ values / scores.sum(-1, keepdims=True)
    pairs = (product, x @ weights.T), (halved, x @ halves.astype(np.float32).T), (attended[0], wanted)
    if not all(np.allclose(got, right, atol=1e-4) for got, right in pairs):
        raise NativeError(f"{path} computes wrong numbers: remove it, and it is built anew; please report it")
