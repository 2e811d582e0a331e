"""Random ragged batches for the kernel tests, with NaN wherever nothing may be read."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels import reference


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """One step's arguments. ``queries`` and ``contexts`` list the real sequences; the rest of S and T is padding."""

    q: np.ndarray
    kv_pages: np.ndarray
    query_starts: np.ndarray
    context_lens: np.ndarray
    block_tables: np.ndarray
    num_layers: int
    decode_only: bool


def ragged_batch(
    seqs: list[tuple[int, int]],
    *,
    seed: int = 0,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    page_size: int = 8,
    num_tokens: int | None = None,
    num_seqs: int | None = None,
    num_layers: int = 2,
    layer: int = 1,
    table_width: int | None = None,
    kv_dtype: str = "float32",
    q_dtype: str = "float32",
    window: int | None = None,
    shared_pages: int = 0,
    decode_only: bool = False,
) -> Batch:
    """Sequences of (query tokens, context), their pages shuffled over a pool.

    Every position that no query of the layer may see is NaN: other layers, the trash page, unused pages, the tails of
    last pages, what lies before all windows; so are the query rows of padding tokens. ``shared_pages`` makes all
    sequences begin with the same pages.
    """
    rng = np.random.default_rng(seed)
    num_heads, num_kv_heads = heads
    num_seqs = num_seqs or len(seqs)
    queries = [n for n, _ in seqs] + [0] * (num_seqs - len(seqs))
    contexts = [n for _, n in seqs] + [0] * (num_seqs - len(seqs))
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    num_tokens = num_tokens or int(starts[-1])
    if decode_only:
        num_tokens = num_seqs
        starts = np.minimum(np.arange(num_seqs + 1), len(seqs)).astype(np.int32)
    needed = [-(-n // page_size) for n in contexts]
    width = table_width or max([1, *needed])
    num_pages = sum(needed) + 4
    free = list(rng.permutation(np.arange(1, num_pages)))
    tables = np.zeros((num_seqs, width), np.int32)
    pool = np.full((num_pages, num_layers, 2, page_size, num_kv_heads, head_dim), np.nan, np.float32)
    for s, count in enumerate(needed):
        tables[s, :count] = [free.pop() for _ in range(count)]
        if s and shared_pages:
            both = min(shared_pages, count, needed[0])
            tables[s, :both] = tables[0, :both]
    for s, (query, context) in enumerate(zip(queries, contexts, strict=True)):
        oldest = 0 if window is None else max(0, context - query + 1 - window)
        for position in range(oldest, context):
            page, offset = tables[s, position // page_size], position % page_size
            pool[page, layer, :, offset] = rng.standard_normal((2, num_kv_heads, head_dim))
    q = rng.standard_normal((num_tokens, num_heads, head_dim), np.float32)
    q[starts[-1] :] = np.nan
    pool = pool.reshape(-1, page_size, num_kv_heads, head_dim)
    stored = (
        pool.astype(ml_dtypes.bfloat16).view(np.uint16) if kv_dtype == "uint16" else pool.astype(jnp.dtype(kv_dtype))
    )
    return Batch(
        q=q.astype(jnp.dtype(q_dtype)),
        kv_pages=stored,
        query_starts=starts,
        context_lens=np.array(contexts, np.int32),
        block_tables=tables,
        num_layers=num_layers,
        decode_only=decode_only,
    )


def expected(batch: Batch, **options) -> np.ndarray:
    """The float64 reference's output."""
    return reference.ragged_paged_attention(
        batch.q,
        batch.kv_pages,
        batch.query_starts,
        batch.context_lens,
        batch.block_tables,
        num_layers=batch.num_layers,
        **options,
    )


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Norm of the difference over the norm of what was expected; NaN anywhere gives NaN."""
    got = np.asarray(got).astype(np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))
