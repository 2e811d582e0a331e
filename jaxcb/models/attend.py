"""What the step hands the decoder: the function that attends."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int

LayerIndex = int | Int[Array, ""]
KV = Any
"""What :class:`Attend` keeps keys and values in; the decoder only passes it from layer to layer."""


@runtime_checkable
class Attend(Protocol):
    """Attention of one layer over ``kv``, into which it writes k and v first."""

    def __call__(
        self, layer: LayerIndex, kv: KV, q: Float[Array, "T H D"], k: Float[Array, "T K D"], v: Float[Array, "T K D"]
    ) -> tuple[KV, Float[Array, "T H D"]]: ...
