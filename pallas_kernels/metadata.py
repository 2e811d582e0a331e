"""What a step's attention needs besides q and the pages: built once a step inside jit, shared by every layer.

Letters: T tokens and S sequences of the bucket, P pages of a block table, H query heads, K KV heads, D head size,
N pages of the pool, L layers, F = N*L*2 flat pages.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from pallas_kernels.checks import BACKENDS, require, require_array, require_integer, require_page_size, require_window
from pallas_kernels.mosaic import MOSAIC_ROWS
from pallas_kernels.native.ops import Tables
from pallas_kernels.platform import platform
from pallas_kernels.triton.targets import TARGETS, default_target, device_capability
from pallas_kernels.triton.work import TritonWork, triton_work
from pallas_kernels.xla.work import WorkLists, work_lists

Backend = Literal["xla", "triton", "mosaic", "native"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """One step's ragged batch, cut into the work of a backend.

    Arguments:
        work: WorkLists for xla, TritonWork for triton and mosaic, Tables for native.
        num_tokens: T.
        page_size: positions in a page.
        num_heads: H.
        num_kv_heads: K.
        head_dim: D. Tiles and splits follow from the heads, so layers that differ in them need one metadata each.
        window: positions that a query looks back on, itself included; None: all. The work lists skip what lies before
            the window, so layers that differ in it need one metadata each.
        decode_only: token i belongs to sequence i and there are no others.
        backend: whose work it is.
    """

    work: WorkLists | TritonWork | Tables
    num_tokens: int = dataclasses.field(metadata={"static": True})
    page_size: int = dataclasses.field(metadata={"static": True})
    num_heads: int = dataclasses.field(metadata={"static": True})
    num_kv_heads: int = dataclasses.field(metadata={"static": True})
    head_dim: int = dataclasses.field(metadata={"static": True})
    window: int | None = dataclasses.field(metadata={"static": True})
    decode_only: bool = dataclasses.field(metadata={"static": True})
    backend: Backend = dataclasses.field(metadata={"static": True})


def default_backend() -> Literal["xla", "triton"]:
    """The backend for the platform that jax runs on: triton on NVIDIA GPUs from Ampere on, xla elsewhere."""
    return "triton" if platform() == "gpu" and device_capability() >= (8, 0) else "xla"


def chosen_backend(backend: Backend | None) -> Backend:
    """What was asked for, or the default.

    Raises:
        ValueError: there is no such backend.
    """
    require(backend is None or backend in BACKENDS, "backend", f"None or one of {', '.join(BACKENDS)}", repr(backend))
    return default_backend() if backend is None else backend


def attention_metadata(
    query_starts: Int32[Array, " S_plus_1"],
    context_lens: Int32[Array, " S"],
    block_tables: Int32[Array, "S P"],
    *,
    num_tokens: int,
    page_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None = None,
    decode_only: bool = False,
    one_path: bool = False,
    backend: Backend | None = None,
    target: str | None = None,
) -> AttentionMetadata:
    """Describe one step's batch for :func:`pallas_kernels.ragged_paged_attention`. Call it once a step, inside jit.

    Arguments:
        query_starts: row of q that holds each sequence's first token, and the number of tokens that aren't padding.
            Padding sequences hold no token.
        context_lens: KV positions of each sequence, this step's tokens included; 0 for padding sequences.
        block_tables: page numbers of each sequence; what lies past its context is never read.
        num_tokens: T, padding included.
        page_size: positions in a page.
        num_heads: H.
        num_kv_heads: K.
        head_dim: D.
        window: positions that a query looks back on, itself included; None: all.
        decode_only: the step holds decodes alone: T == S and token i belongs to sequence i.
        one_path: single tokens go the way of chunks, in tiles whose shape is the same in every bucket, so that a
            token's bits don't depend on how the batch was cut. (The native backend has one way anyhow.)
        backend: None chooses by platform.
        target: the GPU that tiles are chosen for (h200, h100, a100, l4), on backends triton and mosaic alone; None: the
            one that jax runs on. Where it runs on a GPU, that one must have what the named one has.

    Raises:
        ValueError: a shape, dtype or number can't be; the message names the argument.
    """
    backend = chosen_backend(backend)
    require_array(block_tables, "block_tables", (None, None), dtypes=("int32",))
    num_seqs = block_tables.shape[0]
    require_array(context_lens, "context_lens", (num_seqs,), dtypes=("int32",))
    require_array(query_starts, "query_starts", (num_seqs + 1,), dtypes=("int32",))
    require_page_size(page_size)
    for name, number in (
        ("num_tokens", num_tokens),
        ("num_heads", num_heads),
        ("num_kv_heads", num_kv_heads),
        ("head_dim", head_dim),
    ):
        require_integer(number, name)
    require_window(window)
    require(num_heads % num_kv_heads == 0, "num_heads", f"a multiple of num_kv_heads = {num_kv_heads}", num_heads)
    require(not one_path or backend != "mosaic", "one_path", "False for backend mosaic", one_path)
    if backend == "mosaic":
        group = num_heads // num_kv_heads
        require(group <= MOSAIC_ROWS, "num_heads", f"at most {MOSAIC_ROWS} a KV head for backend mosaic", num_heads)
    require_target(target, backend)
    if decode_only:
        require(num_tokens == num_seqs, "num_tokens", f"the number of sequences ({num_seqs}) of decodes", num_tokens)
    query_starts, context_lens, block_tables = map(jnp.asarray, (query_starts, context_lens, block_tables))
    work: WorkLists | TritonWork | Tables
    if backend == "xla":
        work = work_lists(
            query_starts,
            context_lens,
            block_tables,
            num_tokens=num_tokens,
            page_size=page_size,
            window=window,
            decode_only=decode_only,
            one_path=one_path,
        )
    elif backend == "native":
        work = Tables(query_starts, context_lens, block_tables)
    else:
        work = triton_work(
            query_starts,
            context_lens,
            block_tables,
            num_tokens=num_tokens,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            window=window,
            decode_only=decode_only,
            one_path=one_path,
            rows=MOSAIC_ROWS if backend == "mosaic" else None,
            target=default_target() if target is None else TARGETS[target],
        )
    return AttentionMetadata(
        work=work,
        num_tokens=num_tokens,
        page_size=page_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        window=window,
        decode_only=decode_only,
        backend=backend,
    )


def require_target(target: str | None, backend: Backend) -> None:
    """Raise ValueError unless tiles for this target are what the backend uses and fit the GPU that is there."""
    require(target is None or target in TARGETS, "target", f"None or one of {', '.join(TARGETS)}", repr(target))
    if target is None:
        return
    require(backend in ("triton", "mosaic"), "target", f"None for backend {backend}", repr(target))
    if platform() == "gpu":
        wanted, here = TARGETS[target], default_target()
        require(here.has_what(wanted), "target", f"None or one that fits the {here.device} there is", repr(target))
