"""HostPages: KV pages in host memory, each an array of its own that the device's DMA engine reaches.

On a GPU they lie in pinned memory: a page goes there and comes back by a copy that no kernel and no thread of the host
takes part in, on a stream beside that of the steps. A program that wrote to that memory itself would hold up the stream
of the steps until the link is done. On a CPU the device's memory is the host's, and being gathered is the copy.

    out    pages of the pool --gathered--> device arrays, one a page --copied--> host arrays
    back   host arrays --copied--> device arrays --scattered--> pages of the pool
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.stages import Compiled
from jaxtyping import Array, Int, Shaped

from jaxcb.step.jobs import Job
from pallas_kernels.platform import platform

HOST_MEMORY = "pinned_host"
"""The kind of a GPU's memory, as jax names it."""
SIZES = (4, 32)
"""Pages that one call moves, one program each; fewer are padded with the trash page."""
MAX_LEAVING = 4
"""Calls whose pages are on their way out; each holds device memory until they have arrived."""

Page = Shaped[Array, "1 ..."]


class HostPages:
    """Pages by their numbers. A page takes memory from its first use on, until another takes its number.

    Nothing here waits for a step: whatever is asked for happens when what it depends on has happened.

    Arguments:
        kv: the device's pages, abstract.
        page: one that was gathered, abstract, with its sharding: [1, ...].
        gather, scatter: ``gather(kv, pages) -> rows``, ``scatter(kv, pages, rows) -> kv``, int32[M] pages and as many
            rows; page 0 is padding.
        memory: the kind of memory; None: by the platform.
    """

    def __init__(
        self,
        kv: Any,
        page: jax.ShapeDtypeStruct,
        gather: Callable[..., Any],
        scatter: Callable[..., Any],
        *,
        memory: str | None = None,
    ):
        self._kv, self._page, self._gather, self._scatter = kv, page, gather, scatter
        memory = memory or (None if platform() == "cpu" else HOST_MEMORY)
        self._device = page.sharding
        self._host = page.sharding if memory is None else page.sharding.with_memory_kind(memory)
        self._pages: dict[int, Page] = {}
        self._leaving: deque[list[Page]] = deque()
        self._programs: dict[tuple[str, int], Compiled] = {}

    def jobs(self, whole: Sharding) -> Iterable[Job]:
        """Every program. ``whole``: the sharding of what every device has all of."""
        for size in SIZES:
            pages = jax.ShapeDtypeStruct((size,), jnp.int32, sharding=whole)
            yield self._job("out", size, jax.jit(self._taken_apart), pages)
            together = jax.jit(self._put_together, donate_argnums=0)
            yield self._job("in", size, together, pages, *[self._page] * size)

    def put(self, kv: Any, moves: Sequence[tuple[int, int]]) -> None:
        """Copy device pages to host pages, as pairs of numbers."""
        for pairs, columns in _calls(moves):
            pages = self._programs["out", columns.shape[1]](kv, columns[0])
            arriving = jax.device_put(pages[: len(pairs)], self._host)
            self._pages.update(zip((number for _, number in pairs), arriving, strict=True))
            self._leaving.append(arriving)
            if len(self._leaving) > MAX_LEAVING:
                jax.block_until_ready(self._leaving.popleft())

    def get(self, kv: Any, moves: Sequence[tuple[int, int]]) -> Any:
        """Copy host pages that were put before to device pages, as pairs of numbers. ``kv`` is donated; the result
        takes its place."""
        for pairs, columns in _calls(moves):
            size = columns.shape[1]
            coming = jax.device_put([self._pages[number] for number, _ in pairs], self._device)
            padding = [self._padding] * (size - len(coming))
            kv = self._programs["in", size](kv, columns[1], *coming, *padding)
        return kv

    @functools.cached_property
    def _padding(self) -> Page:
        shape, dtype = self._page.shape, self._page.dtype
        part = np.zeros(self._device.shard_shape(shape), dtype)
        parts = [jax.device_put(part, device) for device in self._device.addressable_devices]
        return jax.make_array_from_single_device_arrays(shape, self._device, parts)

    def _taken_apart(self, kv: Any, pages: Int[Array, "M"]) -> list[Page]:
        rows = self._gather(kv, pages)
        return [rows[i : i + 1] for i in range(rows.shape[0])]

    def _put_together(self, kv: Any, pages: Int[Array, "M"], *parts: Page) -> Any:
        return self._scatter(kv, pages, jnp.concatenate(parts))

    def _job(self, name: str, size: int, program: Any, *arguments: jax.ShapeDtypeStruct) -> Job:
        lower = functools.partial(program.lower, self._kv, *arguments)
        return Job(f"pages {name} {size}", lower, functools.partial(self._programs.__setitem__, (name, size)))


def _calls(moves: Sequence[tuple[int, int]]) -> Iterator[tuple[Sequence[tuple[int, int]], Int[np.ndarray, "2 M"]]]:
    """Pairs of (from, to), as many as a call moves, and the same as columns padded to its size."""
    for start in range(0, len(moves), SIZES[-1]):
        pairs = moves[start : start + SIZES[-1]]
        columns = np.zeros((2, next(size for size in SIZES if size >= len(pairs))), np.int32)
        columns[:, : len(pairs)] = np.asarray(pairs, np.int32).T
        yield pairs, columns
