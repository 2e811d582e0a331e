"""Sizes of a runner's device arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxcb.models import ModelSpec
from jaxcb.step.kv_pool import KVPages
from pallas_kernels import native
from pallas_kernels.metadata import Backend
from pallas_kernels.platform import platform


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunnerShape:
    """Sizes of the device arrays. ``num_pages`` counts usable pages; the trash page is added here."""

    num_pages: int
    page_size: int
    num_slots: int
    max_model_len: int
    num_host_pages: int = 0
    """Pages kept in host memory."""
    transfers: bool = False
    """Pages are read for other engines, and written from theirs."""
    int8_kv: bool = False
    """Pages hold int8 with scales, instead of numbers of the weights' dtype."""

    @property
    def table_width(self) -> int:
        """P: pages of the longest sequence."""
        return -(-self.max_model_len // self.page_size)


def kv_shape(spec: ModelSpec, shape: RunnerShape, num_devices: int = 1) -> tuple[int, ...]:
    """[N, L, 2, page_size, K, D], the trash page included, on so many devices with ``spec`` each."""
    heads = num_devices * spec.num_kv_heads
    return (shape.num_pages + 1, spec.num_layers, 2, shape.page_size, heads, spec.head_dim)


def kv_dtype(weights: Any, backend: Backend) -> Any:
    """Pages hold the weights' dtype. XLA's CPU scatter converts a whole bfloat16 array, so there its bits are kept."""
    return jnp.uint16 if weights == jnp.bfloat16 and platform() == "cpu" and backend != "triton" else weights


def empty_pages(kv: Any, backend: Backend) -> KVPages:
    """Pages that hold nothing. For the native kernels nothing counts that was not written, whatever is there, so that
    theirs take up memory as they come into use."""
    make = native.untouched if backend == "native" else jnp.zeros
    return jax.tree.map(lambda part: make(part.shape, part.dtype), kv)
