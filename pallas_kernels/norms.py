"""Norms that a fused kernel does on the way, and queries that attention finishes itself.

A norm before a product can be left to what comes after the product. With the scale w in the weights W, rows x and
r = 1 / rms(x), ``norm(x) @ W.T + b`` is ``r * (x @ (w * W).T) + b``: a :class:`LateNorm` of that product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxtyping import Array, Float, Float32

from pallas_kernels.checks import require, require_array, require_integer, require_number
from pallas_kernels.pages import PLAIN_DTYPES


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


def require_angles(cos: Float32[Array, "T D/2"], sin: Float32[Array, "T D/2"], num_tokens: int, head_dim: int) -> None:
    """Raise ValueError unless heads of ``head_dim`` can be rotated by these angles."""
    require(head_dim % 2 == 0, "qkv", "of an even head size", head_dim)
    for name, table in (("cos", cos), ("sin", sin)):
        require_array(table, name, (num_tokens, head_dim // 2), dtypes=("float32",))


def require_head_norm(head_norm: HeadNorm | None, head_dim: int) -> None:
    """Raise ValueError unless it is a norm of heads of ``head_dim``, or None."""
    if head_norm is None:
        return
    for name, scale in (("head_norm.q_scale", head_norm.q_scale), ("head_norm.k_scale", head_norm.k_scale)):
        require_array(scale, name, (head_dim,), dtypes=("float32",))
    require_number(head_norm.eps, "head_norm.eps", least=0)


def require_late_norm(late_norm: LateNorm | None, num_rows: int, num_columns: int) -> None:
    """Raise ValueError unless it is a norm of a product [num_rows, num_columns], or None."""
    if late_norm is None:
        return
    require_array(late_norm.x, "late_norm.x", (num_rows, None), dtypes=PLAIN_DTYPES)
    require_number(late_norm.eps, "late_norm.eps", least=0)
    if late_norm.bias is not None:
        require_array(late_norm.bias, "late_norm.bias", (num_columns,), dtypes=PLAIN_DTYPES)


def require_raw_queries(q: RawQueries) -> None:
    """Raise ValueError unless a kernel can finish the queries, whose ``qkv`` has three axes."""
    num_tokens, heads, head_dim = q.qkv.shape
    require_integer(q.num_heads, "q.num_heads")
    require(q.num_heads <= heads, "q.num_heads", f"at most the {heads} heads of q.qkv", q.num_heads)
    require_angles(q.cos, q.sin, num_tokens, head_dim)
    require_head_norm(q.head_norm, head_dim)
    require_late_norm(q.late_norm, num_tokens, heads * head_dim)
