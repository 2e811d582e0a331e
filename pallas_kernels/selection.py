"""Top-k and top-p without a sort: the weight from which on a row's tokens are kept.

On a CPU it is found by a binary search over the bits of a float: 62 passes of compare-and-reduce for both. For a GPU
XLA makes two loops of that, which break the step's CUDA graph in five, and which read 8.1 GB for 256 rows of Llama-3's
vocabulary (the rows, 131 MB, don't fit an H200's caches). By sorting, top-k is 24 kernels and 11 GB. The triton kernel
reads a row twice, 0.26 GB, where some thousands of tokens come near the threshold, and 10 to 22 times where the row is
flat; it is one launch.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.checks import require_array
from pallas_kernels.metadata import Backend, chosen_backend
from pallas_kernels.triton import selection as triton
from pallas_kernels.xla.threshold import kth_largest, mass_threshold


def least_kept_weight(
    weights: Float[Array, "S V"],
    top_k: Int32[Array, " S"],
    top_p: Float[Array, " S"],
    *,
    backend: Backend | None = None,
    interpret: bool = False,
) -> Float[Array, " S"]:
    """What top-k, and then top-p of what it kept, leave of each row: the tokens of at least the returned weight.

    Those that tie with the last one that is kept stay too. A row of zeros, and weights too small to be normal float32
    numbers, give 0. Backends sum in orders of their own: where a share equals top_p but for rounding they may differ.

    Arguments:
        weights: at least 0 and at most 1. A row that holds NaN has no meaning.
        top_k: 0 and less, or V and more, keeps all (Fan et al. 2018).
        top_p: the likeliest tokens whose share reaches it stay, the likeliest always, which 0 and less leaves alone; 1
            and more keeps all (Holtzman et al. 2020).
        backend: None chooses by platform. triton and mosaic are the one kernel, xla and native the binary search.
        interpret: run the triton kernel in Pallas's interpreter, on any platform.

    Returns:
        The weight from which on a row's tokens are kept: ``weights >= result[:, None]`` are. 0 keeps all.

    Raises:
        ValueError: a shape or dtype can't be; the message names the argument.
    """
    backend = chosen_backend(backend)
    require_array(weights, "weights", (None, None), dtypes=("float32",))
    num_rows, size = weights.shape
    require_array(top_k, "top_k", (num_rows,), dtypes=("int32",))
    require_array(top_p, "top_p", (num_rows,), dtypes=("float32",))
    if backend in ("triton", "mosaic"):
        return triton.least_kept_weight(weights, top_k, top_p, interpret=interpret)
    by_rank = (top_k > 0) & (top_k < size)
    rank = jnp.where(by_rank, kth_largest(weights, jnp.where(by_rank, top_k, size)), 0.0)
    weights = jnp.where(weights >= rank[:, None], weights, 0.0)
    return jnp.maximum(rank, mass_threshold(weights, weights, top_p))
