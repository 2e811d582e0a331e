"""PageMover: carries out a plan's PageMoves on the device's pages, and keeps the pages in host memory."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled
from jaxtyping import Shaped

from jaxcb.devices import PAGES, WHOLE, Placement, placement_of
from jaxcb.paging import PageMoves
from jaxcb.step.host_pages import HostPages
from jaxcb.step.jobs import Job
from jaxcb.step.kv_pool import KVPages, PageRows, gather_rows, scatter_rows
from pallas_kernels import copy_pages
from pallas_kernels.metadata import Backend
from pallas_kernels.platform import platform

PAGES_PER_MOVE = 32
"""Pages that one call copies or transfers; fewer are padded with the trash page."""


class PageMover:
    """Not thread-safe: the engine's thread calls it.

    Everything is queued on the device behind the steps in flight, so the host waits for nothing but, where more pages
    leave than the link takes, for the oldest of them.

    Arguments:
        kv: the device's pages, as they are given to every call.
        num_host_pages: pages of host memory.
        placement: the devices that they lie on; each has some heads.
        copies: devices that have the same head, beside each other. Other engines are given one of each.
        transfers: :meth:`read` and :meth:`write` will be used.
    """

    def __init__(
        self,
        kv: KVPages,
        num_host_pages: int,
        backend: Backend,
        placement: Placement | None = None,
        *,
        copies: int = 1,
        transfers: bool = False,
    ):
        self.num_host_pages, self._transfers = num_host_pages, transfers
        self._placement, self._copies = placement_of(None, 1) if placement is None else placement, copies
        spread = self._placement.spread
        self._gather = spread(gather_rows, (PAGES, WHOLE), PAGES)
        self._scatter = spread(scatter_rows, (PAGES, WHOLE, PAGES), PAGES)
        self._kv, self._backend = jax.tree.map(_abstract, kv), backend
        self._pages = self._placement.abstract((PAGES_PER_MOVE,), jnp.int32)
        rows = jax.eval_shape(gather_rows, self._kv, self._pages)
        self.rows = jax.ShapeDtypeStruct(rows.shape, rows.dtype, sharding=self._placement.sharding(PAGES))
        """What :meth:`gather` gives and :meth:`scatter` takes."""
        page = rows.shape[1:] if copies == 1 else (*rows.shape[1:4], rows.shape[4] // copies, rows.shape[5])
        self.page = jax.ShapeDtypeStruct(page, rows.dtype)
        """A page where it has left the pool for another engine: a row of what :meth:`read` returns."""
        one = jax.ShapeDtypeStruct((1, *rows.shape[1:]), rows.dtype, sharding=self.rows.sharding)
        self._host = HostPages(self._kv, one, self._gather, self._scatter) if num_host_pages else None
        self._programs: dict[str, Compiled] = {}

    def jobs(self) -> Iterable[Job]:
        """Every program."""
        one_copy = functools.partial(copy_pages, backend=self._backend, interpret=platform() == "cpu")
        copy = jax.jit(self._placement.spread(one_copy, (PAGES, WHOLE, WHOLE), PAGES), donate_argnums=0)
        yield self._job("copy", copy, self._pages, self._pages)
        if self._host is not None:
            yield from self._host.jobs(self._placement.whole)
        if self._transfers:
            yield self._job("gather", jax.jit(self._gather), self._pages)
            yield self._job("scatter", jax.jit(self._scatter, donate_argnums=0), self._pages, self.rows)

    def move(self, kv: KVPages, moves: PageMoves) -> KVPages:
        """Out, in, copy. ``kv`` is donated where pages are written; the result takes its place."""
        if self._host is not None:
            self._host.put(kv, moves.out)
            kv = self._host.get(kv, moves.into)
        for pairs in _batches(moves.copies):
            sources, destinations = _columns(pairs)
            kv = self._programs["copy"](kv, sources, destinations)
        return kv

    def read(self, kv: KVPages, pages: list[int]) -> Shaped[np.ndarray, "n ..."]:
        """The content of device pages, for another engine. Waits for the steps in flight."""
        parts = []
        for start in range(0, len(pages), PAGES_PER_MOVE):
            batch = pages[start : start + PAGES_PER_MOVE]
            parts.append(self._on_host(self.gather(kv, batch))[: len(batch)])
        return np.concatenate(parts) if parts else np.empty((0, *self.page.shape), self.page.dtype)

    def write(self, kv: KVPages, pages: list[int], rows: Shaped[np.ndarray, "n ..."]) -> KVPages:
        """Give device pages the content of another engine's. ``kv`` is donated."""
        for start in range(0, len(pages), PAGES_PER_MOVE):
            batch = pages[start : start + PAGES_PER_MOVE]
            padded = np.zeros((PAGES_PER_MOVE, *self.page.shape), self.page.dtype)
            padded[: len(batch)] = rows[start : start + len(batch)]
            kv = self.scatter(kv, batch, self._for_devices(padded))
        return kv

    def gather(self, kv: KVPages, pages: list[int]) -> PageRows:
        """A copy of at most PAGES_PER_MOVE pages as the steps launched so far leave them, on the device; n is
        PAGES_PER_MOVE, and what stands after the pages is of no meaning. Waits for nothing."""
        return self._programs["gather"](kv, _columns([(page, 0) for page in pages])[0])

    def scatter(self, kv: KVPages, pages: list[int], rows: PageRows | np.ndarray) -> KVPages:
        """Give at most PAGES_PER_MOVE device pages the content that stands in as many rows, n of them as of
        :meth:`gather`. ``kv`` is donated; steps to come wait for the rows, if they are not ready."""
        return self._programs["scatter"](kv, _columns([(0, page) for page in pages])[1], rows)

    def measure(self, kv: KVPages, rounds: int = 3) -> tuple[KVPages, float]:
        """Seconds in which a page moves to host memory or back, the best of some rounds of one call each way.

        What the pages hold goes there and comes back. ``kv`` is donated.
        """
        count = min(PAGES_PER_MOVE, self.num_host_pages, jax.tree.leaves(kv)[0].shape[0] - 1)
        out = [(page, page) for page in range(1, count + 1)]
        times = []
        for _ in range(rounds + 1):  # the first touches the memory
            started_s = time.perf_counter()
            kv = self.move(kv, PageMoves(out=out, into=out))
            jax.block_until_ready(kv)
            times.append(time.perf_counter() - started_s)
        return kv, min(times) / (2 * count)

    def _on_host(self, rows: jax.Array) -> np.ndarray:
        """Gathered pages with every head once."""
        return np.asarray(rows) if self._copies == 1 else np.asarray(rows)[..., :: self._copies, :]

    def _for_devices(self, rows: np.ndarray) -> np.ndarray:
        """Pages with every head as often as there are devices that have it."""
        return rows if self._copies == 1 else np.repeat(rows, self._copies, -2)

    def _job(self, name: str, program: Any, *arguments: jax.ShapeDtypeStruct) -> Job:
        lower = functools.partial(program.lower, self._kv, *arguments)
        return Job(f"{name} pages", lower, functools.partial(self._programs.__setitem__, name))


def _abstract(part: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=part.sharding)


def _batches(pairs: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    rest = iter(pairs)
    while batch := list(islice(rest, PAGES_PER_MOVE)):
        yield batch


def _columns(pairs: list[tuple[int, int]]) -> np.ndarray:
    """int32[2, PAGES_PER_MOVE]: what is read, what is written, padded with zeros."""
    columns = np.zeros((2, PAGES_PER_MOVE), np.int32)
    columns[:, : len(pairs)] = np.asarray(pairs, np.int32).T
    return columns
