"""int8 weights: symmetric, a scale an output channel, made when a model is loaded; the native kernels multiply them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxcb.models.params import Params

_LINEAR = ("qkv", "o", "gate_up", "down")


def quantize(params: Params) -> Params:
    """The same model with the kernels of its layers and of its head as int8.

    A linear part {"kernel": [O, I], ...} becomes {"kernel": int8 [O, I], "scale": float32 [O], ...}, where
    kernel * scale is the weight; experts [X, O, I] become int8 [X, O, I] with float32 [X, O], and routers stay as they
    are. A tied model gets a head of its own; the embedding that tokens are looked up in stays.
    What is int8 already stays as it is.
    """
    layers = {
        index: {name: _quantized(part) if name in _LINEAR else part for name, part in layer.items()}
        for index, layer in params["layers"].items()
    }
    head = params.get("lm_head", {"kernel": params["embed"]["embedding"]})
    return params | {"layers": layers, "lm_head": _quantized(head)}


def _quantized(part: Params) -> Params:
    if "scale" in part:
        return part
    kernel, scale = _rounded(part["kernel"])
    return part | {"kernel": kernel, "scale": scale}


@jax.jit
def _rounded(kernel: Float[Array, "*X O I"]) -> tuple[Array, Float[Array, "*X O"]]:
    kernel = kernel.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(kernel), -1), jnp.finfo(jnp.float32).tiny) / 127
    return jnp.round(kernel / scale[..., None]).astype(jnp.int8), scale
