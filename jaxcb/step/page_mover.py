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
from jaxtyping import Array, Shaped

from jaxcb.devices import PAGES, WHOLE, Placement, placement_of
from jaxcb.paging import PageMoves
from jaxcb.step.host_pages import HostPages
from jaxcb.step.jobs import Job
from pallas_kernels import copy_pages, gather_pages, scatter_pages
from pallas_kernels.metadata import Backend
from pallas_kernels.platform import platform

PAGES_PER_MOVE = 32
"""Pages that one call copies or transfers; fewer are padded with the trash page."""

KVPages = Shaped[Array, "N L 2 page_size K D"]


class PageMover:
    """Not thread-safe: the engine's thread calls it.

    Everything is queued on the device behind the steps in flight, so the host waits for nothing but, where more pages
    leave than the link takes, for the oldest of them.

    Arguments:
        kv: the device's pages, as they are given to every call.
        num_host_pages: pages of host memory.
        placement: the devices that they lie on; each has some heads.
        copies: devices that have the same head, beside each other. In host memory there is one of each.
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
        self._kv, self._backend = jax.ShapeDtypeStruct(kv.shape, kv.dtype, sharding=kv.sharding), backend
        self._placement, self._copies = placement_of(None, 1) if placement is None else placement, copies
        self.page_shape = (*kv.shape[1:4], kv.shape[4] // copies, kv.shape[5])
        """[L, 2, page_size, K, D] of a page in host memory."""
        spread = self._placement.spread
        self._gather = spread(gather_pages, (PAGES, WHOLE), PAGES)
        self._scatter = spread(scatter_pages, (PAGES, WHOLE, PAGES), PAGES)
        self._host = HostPages(self._kv, self._rows(1), self._gather, self._scatter) if num_host_pages else None
        self._programs: dict[str, Compiled] = {}

    @property
    def rows(self) -> jax.ShapeDtypeStruct:
        """What :meth:`gather` gives and :meth:`scatter` takes."""
        return self._rows(PAGES_PER_MOVE)

    def jobs(self) -> Iterable[Job]:
        """Every program."""
        spread, pages = self._placement.spread, self._placement.abstract((PAGES_PER_MOVE,), jnp.int32)
        one_copy = functools.partial(copy_pages, backend=self._backend, interpret=platform() == "cpu")
        copy = jax.jit(spread(one_copy, (PAGES, WHOLE, WHOLE), PAGES), donate_argnums=0)
        yield self._job("copy", copy, pages, pages)
        if self._host is not None:
            yield from self._host.jobs(self._placement.whole)
        if self._transfers:
            yield self._job("gather", jax.jit(self._gather), pages)
            yield self._job("scatter", jax.jit(self._scatter, donate_argnums=0), pages, self.rows)

    def _rows(self, count: int) -> jax.ShapeDtypeStruct:
        """Pages that were gathered, or are to be scattered."""
        sharding = self._placement.sharding(PAGES)
        return jax.ShapeDtypeStruct((count, *self._kv.shape[1:]), self._kv.dtype, sharding=sharding)

    def move(self, kv: KVPages, moves: PageMoves) -> KVPages:
        """Out, in, copy. ``kv`` is donated where pages are written; the result takes its place."""
        if self._host is not None:
            self._host.put(kv, moves.out)
            kv = self._host.get(kv, moves.into)
        for pairs in _batches(moves.copies):
            sources, destinations = _columns(pairs)
            kv = self._programs["copy"](kv, sources, destinations)
        return kv

    def read(self, kv: KVPages, pages: list[int]) -> Shaped[np.ndarray, "n L 2 page_size K D"]:
        """The content of device pages, for another engine. Waits for the steps in flight."""
        parts = []
        for start in range(0, len(pages), PAGES_PER_MOVE):
            batch = pages[start : start + PAGES_PER_MOVE]
            parts.append(self._on_host(self.gather(kv, batch))[: len(batch)])
        return np.concatenate(parts) if parts else np.empty((0, *self.page_shape), self._kv.dtype)

    def write(self, kv: KVPages, pages: list[int], rows: Shaped[np.ndarray, "n L 2 page_size K D"]) -> KVPages:
        """Give device pages the content of another engine's. ``kv`` is donated."""
        for start in range(0, len(pages), PAGES_PER_MOVE):
            batch = pages[start : start + PAGES_PER_MOVE]
            padded = np.zeros((PAGES_PER_MOVE, *self.page_shape), self._kv.dtype)
            padded[: len(batch)] = rows[start : start + len(batch)]
            kv = self.scatter(kv, batch, self._for_devices(padded))
        return kv

    def gather(self, kv: KVPages, pages: list[int]) -> Shaped[Array, "n L 2 page_size K D"]:
        """A copy of at most PAGES_PER_MOVE pages as the steps launched so far leave them, on the device; n is
        PAGES_PER_MOVE, and what stands after the pages is of no meaning. Waits for nothing."""
        return self._programs["gather"](kv, _columns([(page, 0) for page in pages])[0])

    def scatter(self, kv: KVPages, pages: list[int], rows: Shaped[Any, "n L 2 page_size K D"]) -> KVPages:
        """Give at most PAGES_PER_MOVE device pages the content that stands in as many rows, n of them as of
        :meth:`gather`. ``kv`` is donated; steps to come wait for the rows, if they are not ready."""
        return self._programs["scatter"](kv, _columns([(0, page) for page in pages])[1], rows)

    def measure(self, kv: KVPages, rounds: int = 3) -> tuple[KVPages, float]:
        """Seconds in which a page moves to host memory or back, the best of some rounds of one call each way.

        What the pages hold goes there and comes back. ``kv`` is donated.
        """
        count = min(PAGES_PER_MOVE, self.num_host_pages, kv.shape[0] - 1)
        out = [(page, page) for page in range(1, count + 1)]
        times = []
        for _ in range(rounds + 1):  # the first touches the memory
            started_s = time.perf_counter()
            kv = self.move(kv, PageMoves(out=out, into=out))
            kv.block_until_ready()
            times.append(time.perf_counter() - started_s)
        return kv, min(times) / (2 * count)

    def _on_host(self, rows: jax.Array) -> np.ndarray:
        """Gathered pages with every head once."""
        return np.asarray(rows)[..., :: self._copies, :]

    def _for_devices(self, rows: np.ndarray) -> np.ndarray:
        """Pages with every head as often as there are devices that have it."""
        return rows if self._copies == 1 else np.repeat(rows, self._copies, -2)

    def _job(self, name: str, program: Any, *arguments: jax.ShapeDtypeStruct) -> Job:
        lower = functools.partial(program.lower, self._kv, *arguments)
        return Job(f"{name} pages", lower, functools.partial(self._programs.__setitem__, name))


def _batches(pairs: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    rest = iter(pairs)
    while batch := list(islice(rest, PAGES_PER_MOVE)):
        yield batch


def _columns(pairs: list[tuple[int, int]]) -> np.ndarray:
    """int32[2, PAGES_PER_MOVE]: what is read, what is written, padded with zeros."""
    columns = np.zeros((2, PAGES_PER_MOVE), np.int32)
    columns[:, : len(pairs)] = np.asarray(pairs, np.int32).T
    return columns
