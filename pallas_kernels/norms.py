"""Norms that a fused kernel does on the way, and queries that attention finishes itself.

A norm before a product can be left to what comes after the product. With the scale w in the weights W, rows x and
r = 1 / rms(x), ``norm(x) @ W.T + b`` is ``r * (x @ (w * W).T) + b``: a :class:`LateNorm` of that product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxtyping import Array, Float, Float32


class HeadNorm(NamedTuple):
    """RMSNorm of every query and key head before it is rotated, as in Qwen3."""

    q_scale: Float32[Array, " D"]
    k_scale: Float32[Array, " D"]
    eps: float


class LateNorm(NamedTuple):
    """What a product's rows still need: 1 / rms of the rows x that went into it, then the bias of the product."""

    x: Float[Array, "T E"]
    eps: float
    bias: Float[Array, " N"] | None = None


class RawQueries(NamedTuple):
    """Queries as a layer's product leaves them: attention norms and rotates them as it reads them.

    Arguments:
        qkv: the H query heads of each token, then its other heads.
        num_heads: H.
        cos: cosines of each token's angles, scaling included.
        sin: their sines.
        head_norm: as for :func:`pallas_kernels.rope_and_write_kv`.
        late_norm: likewise.
    """

    qkv: Float[Array, "T heads D"]
    num_heads: int
    cos: Float32[Array, "T D/2"]
    sin: Float32[Array, "T D/2"]
    head_norm: HeadNorm | None = None
    late_norm: LateNorm | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the queries: T, H, D."""
        return (self.qkv.shape[0], self.num_heads, self.qkv.shape[2])

    @property
    def dtype(self) -> Any:
        return self.qkv.dtype
