"""The functions in plain numpy and float64, one sequence and one head at a time: what the backends are judged by."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from jaxtyping import Float, Int32, Shaped


def ragged_paged_attention(
    q: Shaped[np.ndarray, "T H D"],
    kv_pages: Shaped[np.ndarray, "N*L*2 page_size K D"],
    query_starts: Int32[np.ndarray, "S+1"],
    context_lens: Int32[np.ndarray, " S"],
    block_tables: Int32[np.ndarray, "S P"],
    *,
    layer: int,
    num_layers: int,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Float[np.ndarray, "T H D"]:
    """:func:`pallas_kernels.ragged_paged_attention` without its metadata. Returns float64; padding tokens are 0."""
    q = np.asarray(q).astype(np.float64)
    pages = _values(kv_pages)
    num_heads, head_dim = q.shape[1:]
    page_size, group = pages.shape[1], num_heads // pages.shape[2]
    scale = head_dim**-0.5 if scale is None else scale
    out = np.zeros_like(q)
    for sequence, context in enumerate(np.asarray(context_lens)):
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
                weights = np.exp(scores - scores.max())
                out[token, head] = weights @ values[seen, head // group] / weights.sum()
    return out


def write_kv(
    kv_pages: Shaped[np.ndarray, "N*L*2 page_size K D"],
    k: Shaped[np.ndarray, "T K D"],
    v: Shaped[np.ndarray, "T K D"],
    pages: Int32[np.ndarray, " T"],
    offsets: Int32[np.ndarray, " T"],
    *,
    layer: int,
    num_layers: int,
) -> Shaped[np.ndarray, "N*L*2 page_size K D"]:
    """:func:`pallas_kernels.write_kv`, token after token, in a copy of the pages."""
    out = np.array(kv_pages)
    for token, (page, offset) in enumerate(zip(np.asarray(pages), np.asarray(offsets), strict=True)):
        first = page * 2 * num_layers + 2 * layer
        for flat_page, row in ((first, k[token]), (first + 1, v[token])):
            if out.dtype == np.uint16:
                out[flat_page, offset] = np.asarray(row).astype(ml_dtypes.bfloat16).view(np.uint16)
            else:
                out[flat_page, offset] = row
    return out


def copy_pages(
    kv: Shaped[np.ndarray, "N ..."], sources: Int32[np.ndarray, " M"], destinations: Int32[np.ndarray, " M"]
) -> Shaped[np.ndarray, "N ..."]:
    """:func:`pallas_kernels.copy_pages` of one array, pair after pair, from the pool as it was, in a copy of it."""
    out = np.array(kv)
    for source, destination in zip(np.asarray(sources), np.asarray(destinations), strict=True):
        out[destination] = kv[source]
    return out


def _values(pages: Shaped[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Pages as float64; uint16 holds the bits of bfloat16."""
    pages = np.asarray(pages)
    return (pages.view(ml_dtypes.bfloat16) if pages.dtype == np.uint16 else pages).astype(np.float64)
