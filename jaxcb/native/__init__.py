"""Chooses the backend of an engine: the native CPU kernels where they can be used, else what XLA compiles.

The kernels themselves are in ``pallas_kernels/native``; nothing of them may come in here.
"""

from __future__ import annotations

import logging
import os
from typing import cast, get_args

import jax.numpy as jnp
from jaxtyping import DTypeLike

from jaxcb.cache import cache_dir
from jaxcb.config import Backend
from jaxcb.errors import ConfigError
from jaxcb.models.spec import ModelSpec
from pallas_kernels import default_backend, native
from pallas_kernels.native.ops import MAX_HEAD_DIM
from pallas_kernels.platform import platform

logger = logging.getLogger(__name__)

VARIABLE = "JAXCB_BACKEND"
"""Environment variable that forces a backend where the configuration names none."""


def asked_for(config_backend: Backend | None) -> Backend | None:
    """The backend that the configuration, or else the environment, names.

    Raises:
        ConfigError: the environment names none that there is.
    """
    if config_backend is not None:
        return config_backend
    name = os.environ.get(VARIABLE, "")
    if name and name not in get_args(Backend):
        raise ConfigError(f"{VARIABLE} must be {', '.join(get_args(Backend))} or unset, got {name!r}", param="backend")
    return cast(Backend, name) if name else None


def choose(config_backend: Backend | None, spec: ModelSpec, dtype: DTypeLike) -> Backend:
    """The backend for a model: what was asked for, else native on a CPU that it runs on, else by platform.

    Raises:
        ConfigError: native was asked for, and can't be had; the message says why.
    """
    asked = asked_for(config_backend)
    if asked not in (None, "native") or (asked is None and platform() != "cpu"):
        return asked or default_backend()
    reason = why_not(spec, dtype) or why_not_loaded()
    if reason is None:
        return "native"
    if asked == "native":
        raise ConfigError(f"backend native can't be used: {reason}", param="backend")
    logger.warning("XLA runs this model, the native CPU kernels can't: %s", reason)
    return default_backend()


def usable(config_backend: Backend | None) -> bool:
    """Whether an engine with this ``backend`` field can take the native kernels, its model apart."""
    return asked_for(config_backend) in (None, "native") and platform() == "cpu" and not why_not_loaded()


def why_not(spec: ModelSpec, dtype: DTypeLike) -> str | None:
    """What of a model the kernels don't take; None if they take it."""
    if spec.head_dim > MAX_HEAD_DIM:
        return f"heads of {spec.head_dim} features, at most {MAX_HEAD_DIM} are supported"
    if jnp.dtype(dtype).name not in native.WEIGHT_DTYPES:
        return f"weights of dtype {jnp.dtype(dtype).name}, supported are {', '.join(native.WEIGHT_DTYPES)}"
    return None


def why_not_loaded() -> str | None:
    """Load the kernels, building them if need be. What was in the way, or None."""
    try:
        native.load(cache_dir() / "native")
    except native.NativeError as error:
        return str(error)
    return None
