"""The gain of a shared prefix, simulated: the real Scheduler under k users, against one user without a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxcb.plan.capacity import Capacity
from jaxcb.plan.formulas import prefix_speedup
from jaxcb.sim.simulator import simulate
from jaxcb.sim.trace import TraceRequest, closed_loop

REQUESTS_PER_USER = 10


class PrefixPoint(NamedTuple):
    """Throughput of ``num_users``, over that of one without a prefix cache."""

    num_users: int
    formula: float
    simulated: float


def prefix_curve(
    capacity: Capacity, *, prefix: int, suffix: int, output: int, users: Sequence[int]
) -> Iterator[PrefixPoint]:
    """A point for each number of users, all of whose prompts begin with the same ``prefix`` tokens."""
    alone = _requests_per_s(capacity, 1, prefix, suffix, output, caching=False)
    for count in users:
        context = prefix + suffix + output / 2
        formula = prefix_speedup(
            count,
            prefix=prefix,
            suffix=suffix,
            output=output,
            token_s=capacity.token_s((prefix + suffix) / 2),
            decode_s=(capacity.decode_s(1, context), capacity.decode_s(count, context)),
        )
        together = _requests_per_s(capacity, count, prefix, suffix, output, caching=True)
        yield PrefixPoint(count, formula, together / alone)


def _requests_per_s(
    capacity: Capacity, num_users: int, prefix: int, suffix: int, output: int, *, caching: bool
) -> float:
    request = TraceRequest(0.0, prefix + suffix, output, ((0, prefix),))
    trace = closed_loop([request] * (REQUESTS_PER_USER * num_users), num_users)
    limits = dataclasses.replace(capacity.limits, enable_prefix_caching=caching)
    result = simulate(limits, trace, capacity.step_time)
    warm = [record for record in result.requests[num_users:] if record.finished_s is not None]
    first_s = min(record.arrival_s for record in warm)  # the first of each user fills the cache
    return len(warm) / (max(record.finished_s or 0.0 for record in warm) - first_s)
