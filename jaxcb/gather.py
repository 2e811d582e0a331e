"""Many things done by a coroutine, a bounded number at a time; and what waits for room in an engine's queue."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from jaxcb.errors import QueueFullError

Item = TypeVar("Item")
Result = TypeVar("Result")
RETRY_S = 0.05
"""Between two tries of a request that found an engine's queue full (``max_waiting``), of other callers' requests."""


async def gather(items: Sequence[Item], work: Callable[[Item], Awaitable[Result]], *, at_once: int) -> list[Result]:
    """``[await work(item) for item in items]``, with ``at_once`` of them under way, so that memory is bounded. The
    first error cancels the others, and is raised by itself."""
    results: dict[int, Result] = {}
    left = enumerate(items)

    async def worker() -> None:
        for index, item in left:
            results[index] = await work(item)

    failures: list[BaseException] = []
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(at_once, len(items))):
                group.create_task(worker())
    except* Exception as errors:
        failures = list(errors.exceptions)
    if failures:
        raise failures[0]
    return [results[index] for index in range(len(items))]


async def when_accepted(submit: Callable[[], Result]) -> Result:
    """``submit()``, as soon as the engine's queue has room."""
    while True:
        try:
            return submit()
        except QueueFullError:
            await asyncio.sleep(RETRY_S)
