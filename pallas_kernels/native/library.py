"""The loaded library of this process: found or built, registered with XLA, and tested before anything uses it.

A library that can't be built, loaded or trusted is reported, and the next best one takes its place. XLA knows a handler
by the library's name too, since it keeps all that was ever registered.
"""

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

from pallas_kernels.native.build import NativeError, build, cpu_variants, library, prebuilt

logger = logging.getLogger(__name__)

HANDLERS = (
    "jaxcb_product",
    "jaxcb_grouped_product",
    "jaxcb_attention",
    "jaxcb_place_and_attend",
    "jaxcb_untouched",
)


class Library(NamedTuple):
    variant: str
    path: Path
    prebuilt: bool = False
    """It came with the package."""

    @property
    def name(self) -> str:
        return f"{self.variant}_prebuilt" if self.prebuilt else self.variant


_lock = threading.Lock()
_loaded: Library | None = None
_failure: NativeError | None = None


def loaded() -> Library | None:
    """What :func:`load` has loaded."""
    return _loaded


def require_loaded() -> Library:
    """What :func:`load` has loaded.

    Raises:
        NativeError: nothing is.
    """
    if _loaded is None:
        raise NativeError("no library is loaded: call pallas_kernels.native.load first")
    return _loaded


def target(handler: str) -> str:
    """What XLA knows a handler of the loaded library by.

    Raises:
        NativeError: none is loaded.
    """
    return f"{handler}_{require_loaded().name}"


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
                _load(directory)
            except NativeError as error:
                _failure = error
                raise
        assert _loaded is not None
        return _loaded


def _load(directory: Path) -> None:
    """Of what can be had for this CPU, the best that passes the test.

    Raises:
        NativeError: nothing does; what was wrong with the last one.
    """
    global _loaded
    if jax.default_backend() != "cpu":
        raise NativeError(f"jax runs on {jax.default_backend()}, the native kernels run on CPUs")
    variants = cpu_variants()
    if not variants:
        raise NativeError("this CPU has neither AVX2 with FMA nor NEON")
    start_s = time.monotonic()
    choices = list(dict.fromkeys((variant, file) for variant in variants for file in (prebuilt(variant), None)))
    for variant, file in choices:
        try:
            _loaded = _registered(_built(directory, variant) if file is None else Library(variant, file, prebuilt=True))
            _self_test(_loaded.path)
            break
        except NativeError as error:
            _loaded = None
            if (variant, file) == choices[-1]:
                raise
            logger.warning("native CPU kernels (%s): %s; the next best are tried", variant, error)
    logger.info("native CPU kernels (%s) ready after %.1f s", variant, time.monotonic() - start_s)


def _built(directory: Path, variant: str) -> Library:
    if not library(directory, variant).is_file():
        logger.warning("building the native CPU kernels (%s) into %s, once", variant, directory)
    return Library(variant, build(directory, variant))


def _registered(found: Library) -> Library:
    """A library that was loaded, and whose handlers XLA has taken.

    Raises:
        NativeError: it is none, or was made for another XLA.
    """
    try:
        shared = ctypes.CDLL(str(found.path))
        for name in HANDLERS:
            capsule = jax.ffi.pycapsule(getattr(shared, name))
            jax.ffi.register_ffi_target(f"{name}_{found.name}", capsule, platform="cpu")
    except (OSError, AttributeError, ValueError, jax.errors.JaxRuntimeError) as error:
        raise NativeError(f"{found.path} can't be loaded: {error}. Remove it, and it is built anew") from error
    return found


def _self_test(path: Path) -> None:
    """Products and an attention of a few numbers, as XLA calls them, against numpy.

    Raises:
        NativeError: they differ.
    """
    from pallas_kernels.native import ops, panels

    rng = np.random.default_rng(0)
    x, weights = rng.standard_normal((3, 21), np.float32), rng.standard_normal((13, 21), np.float32)
    x = x.astype(jnp.bfloat16).astype(np.float32)  # where the CPU multiplies bfloat16, that is what it is rounded to
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
