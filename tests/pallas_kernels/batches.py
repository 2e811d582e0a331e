"""Random ragged batches for the kernel tests, with NaN wherever nothing may be read."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels import Backend, QuantizedPages, attention_metadata, ragged_paged_attention, reference


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """One step's arguments, and the options it was built for."""

    q: np.ndarray
    kv_pages: Any
    query_starts: np.ndarray
    context_lens: np.ndarray
    block_tables: np.ndarray
    layer: int
    num_layers: int
    window: int | None
    decode_only: bool
    sinks: np.ndarray | None

    def expected(self, *, soft_cap: float | None = None, scale: float | None = None) -> np.ndarray:
        """The float64 reference's output."""
        return reference.ragged_paged_attention(
            self.q,
            self.kv_pages,
            self.query_starts,
            self.context_lens,
            self.block_tables,
            layer=self.layer,
            num_layers=self.num_layers,
            window=self.window,
            soft_cap=soft_cap,
            scale=scale,
            sinks=self.sinks,
        )

    def attend(
        self,
        backend: Backend,
        *,
        soft_cap: float | None = None,
        scale: float | None = None,
        traced_layer: bool = False,
        one_path: bool = False,
    ) -> np.ndarray:
        """The backend's output; triton runs in interpret mode. Batches of equal shapes share one compiled function."""
        layer = jnp.int32(self.layer) if traced_layer else self.layer
        attend = _ATTEND[backend, traced_layer]
        options = self._options(backend) | {"one_path": one_path}
        return np.asarray(attend(*self.arrays, layer=layer, scale=scale, soft_cap=soft_cap, **options))

    def compiled(self, backend: Backend) -> jax.stages.Compiled:
        """The compiled function."""
        options = self._options(backend)
        return (
            _ATTEND[backend, False]
            .lower(*self.arrays, layer=self.layer, scale=None, soft_cap=None, **options)
            .compile()
        )

    @property
    def arrays(self) -> tuple[Any, ...]:
        return self.q, self.kv_pages, self.query_starts, self.context_lens, self.block_tables, self.sinks

    def _options(self, backend: Backend) -> dict[str, Any]:
        return {
            "num_layers": self.num_layers,
            "window": self.window,
            "decode_only": self.decode_only,
            "backend": backend,
        }


def attend(
    q: jax.Array,
    kv_pages: Any,
    query_starts: jax.Array,
    context_lens: jax.Array,
    block_tables: jax.Array,
    sinks: jax.Array | None,
    *,
    layer: int | jax.Array,
    num_layers: int,
    scale: float | None,
    window: int | None,
    soft_cap: float | None,
    decode_only: bool,
    backend: Backend,
    one_path: bool = False,
    interpret: bool = True,
    target: str | None = None,
) -> jax.Array:
    """Metadata and attention of one layer."""
    _, page_size, num_kv_heads, _ = jax.tree.leaves(kv_pages)[0].shape
    metadata = attention_metadata(
        query_starts,
        context_lens,
        block_tables,
        num_tokens=q.shape[0],
        page_size=page_size,
        num_heads=q.shape[1],
        num_kv_heads=num_kv_heads,
        head_dim=q.shape[2],
        window=window,
        decode_only=decode_only,
        one_path=one_path,
        backend=backend,
        target=target,
    )
    return ragged_paged_attention(
        q,
        kv_pages,
        metadata,
        layer=layer,
        num_layers=num_layers,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        backend=backend,
        interpret=interpret,
    )


_STATIC = ("num_layers", "scale", "window", "soft_cap", "decode_only", "backend", "one_path")
_FAST_TO_COMPILE = {"xla_backend_optimization_level": 0}
"""For kernels in the interpreter: they are large programs that run once."""
_ATTEND = {
    (backend, traced_layer): jax.jit(
        attend,
        static_argnames=_STATIC if traced_layer else (*_STATIC, "layer"),
        compiler_options=_FAST_TO_COMPILE if backend == "triton" else None,
    )
    for backend in get_args(Backend)
    for traced_layer in (False, True)
}


def ragged_batch(
    seqs: list[tuple[int, int]],
    *,
    seed: int = 0,
    heads: tuple[int, int] = (9, 3),
    head_dim: int = 16,
    page_size: int = 8,
    num_tokens: int | None = None,
    num_seqs: int | None = None,
    num_layers: int = 2,
    layer: int = 1,
    table_width: int | None = None,
    num_pages: int | None = None,
    dtype: str = "float32",
    kv_dtype: str | None = None,
    window: int | None = None,
    shared_pages: int = 0,
    decode_only: bool = False,
    sinks: bool = False,
) -> Batch:
    """Sequences of (query tokens, context), in order, padded to ``num_seqs`` and ``num_tokens``.

    All that no query may see is NaN: other layers, the trash page, unused pages, the tails of last pages, positions
    before every window, the queries of padding tokens. ``shared_pages``: all sequences begin with the same pages.
    ``kv_dtype`` of one byte makes quantised pages (uint8 is the bits of float8), whose scales are NaN there instead.
    """
    rng = np.random.default_rng(seed)
    num_heads, num_kv_heads = heads
    num_seqs = num_seqs or len(seqs)
    padded = seqs + [(0, 0)] * (num_seqs - len(seqs))
    starts = np.cumsum([0] + [queries for queries, _ in padded]).astype(np.int32)
    num_tokens = num_tokens or (num_seqs if decode_only else int(starts[-1]))
    needed = [-(-context // page_size) for _, context in padded]
    num_pages = num_pages or sum(needed) + 4
    free = list(rng.permutation(np.arange(1, num_pages)))
    tables = np.zeros((num_seqs, table_width or max(needed)), np.int32)
    pool = np.full((num_pages, num_layers, 2, page_size, num_kv_heads, head_dim), np.nan, np.float32)
    for sequence, (queries, context) in enumerate(padded):
        used = [free.pop() for _ in range(needed[sequence])]
        used[:shared_pages] = tables[0, : min(shared_pages, len(used))] if sequence else used[:shared_pages]
        tables[sequence, : len(used)] = used
        oldest = 0 if window is None else max(0, context - queries + 1 - window)
        for position in range(oldest, context):
            rows = rng.standard_normal((2, num_kv_heads, head_dim))
            pool[tables[sequence, position // page_size], layer, :, position % page_size] = rows
    q = rng.standard_normal((num_tokens, num_heads, head_dim), np.float32)
    q[starts[-1] :] = np.nan
    return Batch(
        q=q.astype(jnp.dtype(dtype)),
        kv_pages=stored(pool.reshape(-1, page_size, num_kv_heads, head_dim), kv_dtype or dtype),
        query_starts=starts,
        context_lens=np.array([context for _, context in padded], np.int32),
        block_tables=tables,
        layer=layer,
        num_layers=num_layers,
        window=window,
        decode_only=decode_only,
        sinks=rng.uniform(0, 4, num_heads).astype(np.float32) if sinks else None,
    )


def stored(pages: np.ndarray, dtype: str) -> Any:
    """Flat pages of float32 in another dtype."""
    bits = {"uint16": ml_dtypes.bfloat16, "uint8": ml_dtypes.float8_e4m3fn}
    number = np.dtype(bits.get(dtype, jnp.dtype(dtype)))
    if number.itemsize > 1:
        return pages.astype(number).view(jnp.dtype(dtype))
    scales = np.abs(pages).max(-1).swapaxes(1, 2) / (127 if dtype == "int8" else 448)
    scaled = np.nan_to_num(pages / scales.swapaxes(1, 2)[..., None], nan=99.0)
    values = np.rint(scaled) if dtype == "int8" else scaled
    return QuantizedPages(values.astype(number).view(jnp.dtype(dtype)), scales)


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Norm of the difference over the norm of what was wanted; NaN if a NaN leaked."""
    return float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want))
