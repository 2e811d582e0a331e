"""The one matrix product of the model, in the form that XLA runs fast on the platform at hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def product(
    x: Float[Array, "T I"], kernel: Float[Array, "I O"] | Float[Array, "O I"], *, transposed: bool = False
) -> Float[Array, "T O"]:
    """``x @ kernel`` (``x @ kernel.T`` if ``transposed``), accumulated in float32.

    The result is float32 on a CPU, where a bfloat16 result would cost up to ten times as much, and the kernel's dtype
    on a GPU, where asking for it saves a cast. XLA's CPU backend computes one bfloat16 row at a hundredth of the speed
    of two, so one row is doubled there.
    """
    x = x.astype(kernel.dtype)
    on_cpu = jax.default_backend() == "cpu"
    alone = on_cpu and x.shape[0] == 1 and kernel.dtype == jnp.bfloat16
    if alone:
        x = jnp.concatenate([x, x])
    dims = (((1,), (1 if transposed else 0,)), ((), ()))
    y = lax.dot_general(x, kernel, dims, preferred_element_type=jnp.float32 if on_cpu else kernel.dtype)
    return y[:1] if alone else y
