"""gather: many things done by a coroutine, a bounded number at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


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
