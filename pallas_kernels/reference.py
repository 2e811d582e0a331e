"""The functions in plain numpy and float64, one sequence and one head at a time: what the backends are judged by."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float, Int32, Shaped

from pallas_kernels.norms import HeadNorm, LateNorm
from pallas_kernels.pages import QuantizedPages

Pages = Any
"""[F, page_size, K, D] of numpy, or QuantizedPages of numpy arrays."""


def ragged_paged_attention(
    q: Shaped[np.ndarray, "T H D"],
    kv_pages: Pages,
    query_starts: Int32[np.ndarray, "S+1"],
    context_lens: Int32[np.ndarray, " S"],
    block_tables: Int32[np.ndarray, "S P"],
    *,
    layer: int,
    num_layers: int,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Shaped[np.ndarray, " H"] | None = None,
) -> Float[np.ndarray, "T H D"]:
    """:func:`pallas_kernels.ragged_paged_attention` without its metadata. Returns float64; padding tokens are 0."""
    q = np.asarray(q).astype(np.float64)
    pages = _values(kv_pages)
    num_heads, head_dim = q.shape[1:]
    page_size, group = pages.shape[1], num_heads // pages.shape[2]
    scale = head_dim**-0.5 if scale is None else scale
    out = np.zeros_like(q)
    for sequence, context in enumerate(np.asarray(context_lens)):
        if context == 0:  # padding
            continue
        start, end = query_starts[sequence : sequence + 2]
        table = np.asarray(block_tables)[sequence, : -(-context // page_size)]
        first = table * (2 * num_layers) + 2 * layer
        keys, values = (pages[first + i].reshape(-1, *pages.shape[2:])[:context] for i in (0, 1))
        for token in range(start, end):
            position = context - (end - token)
            seen = slice(0 if window is None else max(0, position + 1 - window), position + 1)
            for head in range(num_heads):
                scores = keys[seen, head // group] @ q[token, head] * scale
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                sink = -np.inf if sinks is None else float(sinks[head])
                peak = max(scores.max(), sink)
                weights = np.exp(scores - peak)
                total = weights.sum() + np.exp(sink - peak)
                out[token, head] = weights @ values[seen, head // group] / total
    return out


def decode_attention(
    q: Shaped[np.ndarray, "S H D"],
    kv_pages: Pages,
    context_lens: Int32[np.ndarray, " S"],
    block_tables: Int32[np.ndarray, "S P"],
    **options: Any,
) -> Float[np.ndarray, "S H D"]:
    """:func:`pallas_kernels.decode_attention`; ``options`` as for :func:`ragged_paged_attention`."""
    starts = np.arange(len(q) + 1, dtype=np.int32)
    return ragged_paged_attention(q, kv_pages, starts, context_lens, block_tables, **options)


def write_kv(
    kv_pages: Pages,
    k: Shaped[np.ndarray, "T K D"],
    v: Shaped[np.ndarray, "T K D"],
    pages: Int32[np.ndarray, " T"],
    offsets: Int32[np.ndarray, " T"],
    *,
    layer: int,
    num_layers: int,
) -> Pages:
    """:func:`pallas_kernels.write_kv`, token after token, in a copy of the pages."""
    values: Any
    scales: Any
    quantized = isinstance(kv_pages, QuantizedPages)
    values, scales = (np.array(x) for x in kv_pages) if quantized else (np.array(kv_pages), None)
    for token, (page, offset) in enumerate(zip(np.asarray(pages), np.asarray(offsets), strict=True)):
        first = page * 2 * num_layers + 2 * layer
        for flat_page, row in ((first, k[token]), (first + 1, v[token])):
            row = np.asarray(row, np.float32)
            if scales is not None:
                row, scales[flat_page, :, offset] = _quantized(row, values.dtype)
            values[flat_page, offset] = row.astype(_stored(values.dtype)).view(values.dtype)
    return values if scales is None else QuantizedPages(values, scales)


def copy_pages(
    kv: Shaped[np.ndarray, "N ..."], sources: Int32[np.ndarray, " M"], destinations: Int32[np.ndarray, " M"]
) -> Shaped[np.ndarray, "N ..."]:
    """:func:`pallas_kernels.copy_pages` of one array, pair after pair, from the pool as it was, in a copy of it."""
    out = np.array(kv)
    for source, destination in zip(np.asarray(sources), np.asarray(destinations), strict=True):
        out[destination] = kv[source]
    return out


def gather_pages(kv: Shaped[np.ndarray, "N ..."], pages: Int32[np.ndarray, " M"]) -> Shaped[np.ndarray, "M ..."]:
    """:func:`pallas_kernels.gather_pages` of one array."""
    return np.stack([kv[page] for page in pages])


def scatter_pages(
    kv: Shaped[np.ndarray, "N ..."], pages: Int32[np.ndarray, " M"], rows: Shaped[np.ndarray, "M ..."]
) -> Shaped[np.ndarray, "N ..."]:
    """:func:`pallas_kernels.scatter_pages` of one array, page after page, in a copy of it."""
    out = np.array(kv)
    for page, row in zip(pages, rows, strict=True):
        out[page] = row
    return out


def rms_norm(x: Shaped[np.ndarray, "T E"], scale: Shaped[np.ndarray, " E"], *, eps: float) -> Float[np.ndarray, "T E"]:
    """:func:`pallas_kernels.rms_norm` in float64."""
    return _normed(x, eps) * np.asarray(scale).astype(np.float64)


def add_rms_norm(
    x: Shaped[np.ndarray, "T E"], y: Shaped[np.ndarray, "T E"], scale: Shaped[np.ndarray, " E"], *, eps: float
) -> tuple[Float[np.ndarray, "T E"], Float[np.ndarray, "T E"]]:
    """:func:`pallas_kernels.add_rms_norm` in float64."""
    total = np.asarray(x).astype(np.float64) + np.asarray(y).astype(np.float64)
    return total, rms_norm(total, scale, eps=eps)


def silu_mul(gate_up: Shaped[np.ndarray, "T 2F"], *, late_norm: LateNorm | None = None) -> Float[np.ndarray, "T F"]:
    """:func:`pallas_kernels.silu_mul` in float64."""
    gate, up = np.split(_finished(gate_up, late_norm), 2, -1)
    return gate / (1 + np.exp(-gate)) * up


def grouped_product(
    x: Shaped[np.ndarray, "R I"], kernels: Shaped[np.ndarray, "G O I"], starts: Int32[np.ndarray, " G_plus_1"]
) -> Float[np.ndarray, "R O"]:
    """:func:`pallas_kernels.grouped_product` in float64, row after row; 0 where nobody's rows are."""
    out = np.zeros((len(x), kernels.shape[1]))
    for group, kernel in enumerate(kernels):
        for row in range(starts[group], starts[group + 1]):
            out[row] = kernel.astype(np.float64) @ x[row].astype(np.float64)
    return out


def rope_and_write_kv(
    kv_pages: Shaped[np.ndarray, "F page_size K D"],
    qkv: Shaped[np.ndarray, "T heads D"],
    cos: Float[np.ndarray, "T D/2"],
    sin: Float[np.ndarray, "T D/2"],
    pages: Int32[np.ndarray, " T"],
    offsets: Int32[np.ndarray, " T"],
    *,
    layer: int,
    num_layers: int,
    head_norm: HeadNorm | None = None,
    late_norm: LateNorm | None = None,
) -> tuple[Float[np.ndarray, "T H D"], Float[np.ndarray, "F page_size K D"]]:
    """:func:`pallas_kernels.rope_and_write_kv` in float64, in a copy of the pages."""
    num_kv_heads = kv_pages.shape[2]
    heads = _finished(qkv.reshape(len(qkv), -1), late_norm).reshape(qkv.shape)
    q, k, v = heads[:, : -2 * num_kv_heads], heads[:, -2 * num_kv_heads : -num_kv_heads], heads[:, -num_kv_heads:]
    if head_norm is not None:
        q = _normed(q, head_norm.eps) * np.asarray(head_norm.q_scale, np.float64)
        k = _normed(k, head_norm.eps) * np.asarray(head_norm.k_scale, np.float64)
    rotation = (cos + 1j * sin).astype(np.complex128)[:, None]
    out = np.asarray(kv_pages).astype(np.float64)
    first = pages * 2 * num_layers + 2 * layer
    out[first, offsets], out[first + 1, offsets] = _turned(k, rotation), v
    return _turned(q, rotation), out


def _turned(heads: Float[np.ndarray, "T heads D"], rotation: np.ndarray) -> Float[np.ndarray, "T heads D"]:
    half = heads.shape[-1] // 2
    pairs = (heads[..., :half] + 1j * heads[..., half:]) * rotation
    return np.concatenate([pairs.real, pairs.imag], -1)


def _normed(x: np.ndarray, eps: float) -> np.ndarray:
    x = np.asarray(x).astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def _finished(rows: Shaped[np.ndarray, "T N"], late_norm: LateNorm | None) -> Float[np.ndarray, "T N"]:
    """A product's rows after its late norm."""
    rows = np.asarray(rows).astype(np.float64)
    if late_norm is None:
        return rows
    x = np.asarray(late_norm.x).astype(np.float64)
    rows = rows / np.sqrt((x * x).mean(-1, keepdims=True) + late_norm.eps)
    return rows if late_norm.bias is None else rows + np.asarray(late_norm.bias).astype(np.float64)


def _quantized(
    row: Float[np.ndarray, "K D"], dtype: np.dtype
) -> tuple[Float[np.ndarray, "K D"], Float[np.ndarray, " K"]]:
    """A row scaled head by head, so that its largest number becomes that of the dtype, and the scales."""
    largest = np.abs(row).max(-1)
    limit = np.float32(127 if dtype == np.int8 else 448)
    scales = np.where(largest == 0, np.float32(1), largest / limit)
    scaled = row / scales[:, None]
    return np.rint(scaled) if dtype == np.int8 else scaled, scales


def _stored(dtype: np.dtype) -> np.dtype:
    """What the bits of pages of this dtype mean."""
    meanings = {"uint16": ml_dtypes.bfloat16, "uint8": ml_dtypes.float8_e4m3fn}
    return np.dtype(meanings.get(dtype.name, dtype))


def _values(kv_pages: Pages) -> Float[np.ndarray, "F page_size K D"]:
    """Pages as float64, scaled if they are quantised."""
    values, scales = kv_pages if isinstance(kv_pages, QuantizedPages) else (kv_pages, None)
    values = np.asarray(values)
    values = values.view(_stored(values.dtype)).astype(np.float64)
    return values if scales is None else values * np.asarray(scales, np.float64).swapaxes(1, 2)[..., None]


def least_kept_weight(
    weights: Float[np.ndarray, "S V"], top_k: Int32[np.ndarray, " S"], top_p: Float[np.ndarray, " S"]
) -> Float[np.ndarray, " S"]:
    """:func:`pallas_kernels.least_kept_weight`, by sorting. Returns float64."""
    size = weights.shape[1]
    out = np.zeros(len(weights))
    for number, (row, k, share) in enumerate(zip(weights.astype(np.float64), top_k, top_p, strict=True)):
        ordered = np.sort(row)[::-1]
        out[number] = ordered[k - 1] if 0 < k < size else 0.0
        kept = ordered[ordered >= out[number]]
        if share < 1 and kept.sum() > 0:
            reached = np.cumsum(kept) >= share * kept.sum()
            out[number] = kept[reached.argmax()]
    return out
