"""Moving whole pages: inside the pool (copy-on-write), out of it (swap, hand-off) and into it.

A page holds all layers, so each is one contiguous run of bytes. Every function takes the pool as one array or as any
pytree of arrays whose first axis counts pages (quantised pages are two arrays).
"""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from pallas_kernels.checks import require, require_array, require_is_array
from pallas_kernels.metadata import Backend, chosen_backend
from pallas_kernels.triton import page_copy as triton

Pool = TypeVar("Pool")
"""[N, L, 2, page_size, K, D], or a pytree of arrays [N, ...]."""


def copy_pages(
    kv: Pool,
    sources: Int32[Array, " M"],
    destinations: Int32[Array, " M"],
    *,
    backend: Backend | None = None,
    interpret: bool = False,
) -> Pool:
    """Copy page ``sources[m]`` over page ``destinations[m]`` for every m, in place if ``kv`` is donated.

    The xla backend gathers all sources, then scatters. The triton backend copies page by page, which moves half the
    bytes; there a page may not be a destination and another pair's source at once.

    Arguments:
        kv: the pool.
        sources: page numbers. Pairs (0, 0) are padding.
        destinations: page numbers, each at most once (but for 0).
        backend: None chooses by platform.
        interpret: run the triton kernel in Pallas's interpreter, on any platform.

    Returns:
        The pool with the destinations overwritten.

    Raises:
        ValueError: a shape or dtype can't be; the message names the argument.
    """
    backend = chosen_backend(backend)
    _require_pages(kv)
    require_array(sources, "sources", (None,), dtypes=("int32",))
    require_array(destinations, "destinations", sources.shape, dtypes=("int32",))
    if backend in ("triton", "mosaic"):
        return jax.tree.map(lambda pool: triton.copy_pages(pool, sources, destinations, interpret=interpret), kv)
    return scatter_pages(kv, destinations, gather_pages(kv, sources))


def gather_pages(
    kv: Pool, pages: Int32[Array, " M"], *, backend: Backend | None = None, interpret: bool = False
) -> Pool:
    """Copies of some pages, [M, L, 2, page_size, K, D]: what leaves the device in a swap or a hand-off.

    Arguments:
        kv: the pool.
        pages: page numbers.
        backend: None is xla everywhere, whose gather is one kernel; triton's has not been timed against it.
        interpret: run the triton kernel in Pallas's interpreter, on any platform.

    Raises:
        ValueError: a shape or dtype can't be; the message names the argument.
    """
    backend = chosen_backend(backend or "xla")
    _require_pages(kv)
    require_array(pages, "pages", (None,), dtypes=("int32",))
    if backend in ("triton", "mosaic"):
        return jax.tree.map(lambda pool: triton.gather_pages(pool, pages, interpret=interpret), kv)

    # The pool seen as rows: XLA's CPU gather copies a row in one go, but an element of many dimensions at a time.
    def read(pool: Array) -> Array:
        rows = jnp.asarray(pool).reshape(pool.shape[0], -1)
        taken = rows.at[pages].get(mode="promise_in_bounds", wrap_negative_indices=False)
        return taken.reshape(-1, *pool.shape[1:])

    return jax.tree.map(read, kv)


def scatter_pages(
    kv: Pool, pages: Int32[Array, " M"], rows: Pool, *, backend: Backend | None = None, interpret: bool = False
) -> Pool:
    """Overwrite page ``pages[m]`` with ``rows[m]`` for every m, in place if ``kv`` is donated.

    Arguments:
        kv: the pool.
        pages: page numbers, each at most once; 0 is padding.
        rows: what :func:`gather_pages` returned, [M, L, 2, page_size, K, D].
        backend: None is xla everywhere, as for :func:`gather_pages`.
        interpret: run the triton kernel in Pallas's interpreter, on any platform.

    Raises:
        ValueError: a shape or dtype can't be; the message names the argument.
    """
    backend = chosen_backend(backend or "xla")
    _require_pages(kv)
    require_array(pages, "pages", (None,), dtypes=("int32",))
    expected, given = str(jax.tree.structure(kv)), str(jax.tree.structure(rows))
    require(given == expected, "rows", f"of structure {expected}", given)
    for pool, new in zip(jax.tree.leaves(kv), jax.tree.leaves(rows), strict=True):
        require_array(new, "rows", (pages.shape[0], *pool.shape[1:]), dtypes=(jnp.dtype(pool.dtype).name,))
    if backend in ("triton", "mosaic"):
        return jax.tree.map(lambda pool, new: triton.scatter_pages(pool, pages, new, interpret=interpret), kv, rows)

    def write(pool: Array, new: Array) -> Array:
        # Fused with what made the rows, the scatter could read pages that it already wrote, and would copy the pool.
        new = lax.optimization_barrier(jnp.asarray(new)).reshape(new.shape[0], -1)
        return jnp.asarray(pool).reshape(pool.shape[0], -1).at[pages].set(new, mode="drop").reshape(pool.shape)

    return jax.tree.map(write, kv, rows)


def _require_pages(kv: object) -> None:
    leaves = jax.tree.leaves(kv)
    require(len(leaves) > 0, "kv", "an array or a pytree of arrays", repr(kv))
    for leaf in leaves:
        require_is_array(leaf, "kv")
        require(len(leaf.shape) >= 2, "kv", "of shape [N, ...]", f"shape {list(leaf.shape)}")
        require(leaf.shape[0] == leaves[0].shape[0], "kv", f"of {leaves[0].shape[0]} pages", f"{leaf.shape[0]} pages")
