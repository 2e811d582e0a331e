"""The mosaic backend: prompt chunks on Hopper through Pallas's Mosaic GPU (TMA, wgmma). Single tokens go to triton."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import DTypeLike

from pallas_kernels.platform import platform
from pallas_kernels.triton.targets import device_capability

MOSAIC_ROWS = 64
"""Rows of a query tile: what one wgmma of one warpgroup takes."""
BLOCK = 64
"""Positions of a product (a page, if that is longer): 64 score columns leave room for 256 features of the result."""
DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128, 256)


def has_api() -> bool:
    """Whether this jax has the ``plgpu.kernel`` that the backend is written for."""
    return tuple(int(x) for x in jax.__version__.split(".")[:2]) >= (0, 11)


def fits(page_size: int, head_dim: int) -> bool:
    """Whether two blocks of keys and values have room in shared memory."""
    return page_size <= BLOCK or head_dim <= 128


def why_not(*, dtype: DTypeLike, num_heads: int, num_kv_heads: int, head_dim: int, page_size: int) -> str | None:
    """Why a model can't attend by this backend on the device that there is; None if it can."""
    if platform() != "gpu" or device_capability() != (9, 0):
        return "it is for GPUs of compute capability 9.0 (Hopper)"
    if not has_api():
        return f"it needs jax 0.11, this is {jax.__version__}"
    if jnp.dtype(dtype).name not in DTYPES:
        return f"it computes in {' or '.join(DTYPES)}, not in {jnp.dtype(dtype).name}"
    if head_dim not in HEAD_DIMS:
        return f"it takes heads of {', '.join(map(str, HEAD_DIMS))} features, not of {head_dim}"
    if num_heads // num_kv_heads > MOSAIC_ROWS:
        return f"it takes {MOSAIC_ROWS} query heads a KV head, not {num_heads // num_kv_heads}"
    if not fits(page_size, head_dim):
        return f"it takes pages of at most {BLOCK} tokens at head size {head_dim}, not of {page_size}"
    return None
