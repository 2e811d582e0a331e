"""PageMover: carries out a plan's PageMoves on the device's pages, and keeps the pages in host memory."""

from __future__ import annotations

import functools
import time
from collections import deque
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
from jaxcb.step.jobs import Job
from pallas_kernels import copy_pages, gather_pages, scatter_pages
from pallas_kernels.metadata import Backend
from pallas_kernels.platform import platform

PAGES_PER_MOVE = 32
"""Pages that one call moves; fewer are padded with the trash page."""
MAX_LEAVING = 4
"""Calls whose pages are on their way to host memory; each holds device memory until they have arrived."""

KVPages = Shaped[Array, "N L 2 page_size K D"]


class PageMover:
    """Not thread-safe: the engine's thread calls it.

    Everything is queued on the device behind the steps in flight, so the host waits for nothing, except for pages that
    come back before they have arrived in host memory.

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
        self._host = np.empty((num_host_pages + 1, *self.page_shape), kv.dtype)  # the system gives memory page by page
        self._leaving: deque[tuple[list[int], jax.Array]] = deque()
        self._programs: dict[str, Compiled] = {}

    @property
    def rows(self) -> jax.ShapeDtypeStruct:
        """What :meth:`gather` gives and :meth:`scatter` takes."""
        sharding = self._placement.sharding(PAGES)
        return jax.ShapeDtypeStruct((PAGES_PER_MOVE, *self._kv.shape[1:]), self._kv.dtype, sharding=sharding)

    def jobs(self) -> Iterable[Job]:
        """Every program."""
        spread, pages, rows = self._placement.spread, self._placement.abstract((PAGES_PER_MOVE,), jnp.int32), self.rows
        one_copy = functools.partial(copy_pages, backend=self._backend, interpret=platform() == "cpu")
        copy = jax.jit(spread(one_copy, (PAGES, WHOLE, WHOLE), PAGES), donate_argnums=0)
        yield self._job("copy", copy, pages, pages)
        if self.num_host_pages or self._transfers:
            yield self._job("gather", jax.jit(spread(gather_pages, (PAGES, WHOLE), PAGES)), pages)
            scatter = jax.jit(spread(scatter_pages, (PAGES, WHOLE, PAGES), PAGES), donate_argnums=0)
            yield self._job("scatter", scatter, pages, rows)

    def move(self, kv: KVPages, moves: PageMoves) -> KVPages:
        """Out, in, copy. ``kv`` is donated where pages are written; the result takes its place."""
        for pairs in _batches(moves.out):
            self._send_out(kv, pairs)
        for pairs in _batches(moves.into):
            kv = self._bring_in(kv, pairs)
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

    def _send_out(self, kv: KVPages, pairs: list[tuple[int, int]]) -> None:
        pages, _ = _columns(pairs)
        rows = self._programs["gather"](kv, pages)
        rows.copy_to_host_async()
        self._leaving.append(([host_page for _, host_page in pairs], rows))
        while len(self._leaving) > MAX_LEAVING or (self._leaving and _is_ready(self._leaving[0][1])):
            self._arrive()

    def _bring_in(self, kv: KVPages, pairs: list[tuple[int, int]]) -> KVPages:
        host_pages, pages = _columns(pairs)
        while any(not set(host_pages.tolist()).isdisjoint(leaving) for leaving, _ in self._leaving):
            self._arrive()
        rows = self._for_devices(self._host[host_pages])  # indexing makes a copy for the upload
        return self._programs["scatter"](kv, pages, rows)

    def _arrive(self) -> None:
        host_pages, rows = self._leaving.popleft()
        self._host[host_pages] = self._on_host(rows)[: len(host_pages)]

    def _on_host(self, rows: jax.Array) -> np.ndarray:
        """Gathered pages with every head once."""
        return np.asarray(rows)[..., :: self._copies, :]

    def _for_devices(self, rows: np.ndarray) -> np.ndarray:
        """Pages with every head as often as there are devices that have it."""
        return rows if self._copies == 1 else np.repeat(rows, self._copies, -2)

    def _job(self, name: str, program: Any, *arguments: jax.ShapeDtypeStruct) -> Job:
        lower = functools.partial(program.lower, self._kv, *arguments)
        return Job(f"{name} pages", lower, functools.partial(self._programs.__setitem__, name))


def _is_ready(rows: Any) -> bool:  # jaxtyping's Array doesn't know the method
    return rows.is_ready()


def _batches(pairs: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    rest = iter(pairs)
    while batch := list(islice(rest, PAGES_PER_MOVE)):
        yield batch


def _columns(pairs: list[tuple[int, int]]) -> np.ndarray:
    """int32[2, PAGES_PER_MOVE]: what is read, what is written, padded with zeros."""
    columns = np.zeros((2, PAGES_PER_MOVE), np.int32)
    columns[:, : len(pairs)] = np.asarray(pairs, np.int32).T
    return columns
