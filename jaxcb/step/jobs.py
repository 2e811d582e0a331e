"""Jobs: the programs of an engine before they are compiled, and how all of them are, several at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple

from jax.stages import Compiled, Lowered
from tqdm import tqdm

from jaxcb.step.program_store import ProgramStore

WORKERS = 4
"""Programs that are traced and compiled at once. Tracing holds Python's lock, XLA and loading don't."""


class Job(NamedTuple):
    """A program to come."""

    name: str
    """No two of an engine have the same."""
    lower: Callable[[], Lowered]
    keep: Callable[[Compiled], Any]
    stored: bool = True
    """Not where it holds code of the user's, which the store can't know to have changed."""


def compile_all(jobs: Iterable[Job], store: ProgramStore | None, *, progress: bool) -> None:
    """Load every program from the store, or compile it and keep it there.

    The first failure, or Ctrl-C, waits only for the programs that are being compiled.
    """
    jobs = list(jobs)
    workers = ThreadPoolExecutor(WORKERS)
    try:
        with tqdm(total=len(jobs), desc="compiling", unit="program", disable=not progress) as bar:
            futures = {workers.submit(_program, job, store): job for job in jobs}
            for future in as_completed(futures):
                futures[future].keep(future.result())
                bar.update()
    finally:
        workers.shutdown(cancel_futures=True)


def _program(job: Job, store: ProgramStore | None) -> Compiled:
    return job.lower().compile() if store is None or not job.stored else store.get(job.name, job.lower)
