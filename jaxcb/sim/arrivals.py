"""From a trace to requests: when each comes, and the token ids that make it share what the trace says."""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Sequence as Seq

from jaxcb.errors import ConfigError
from jaxcb.request import Request, SamplingParams
from jaxcb.sim.trace import TraceRequest

DUMMY_TOKEN = 0
"""What an answer consists of, unless a later prompt repeats it."""


class Arrivals:
    """The requests of a trace in the order in which they come, some only after others have ended.

    Raises:
        ConfigError: the trace isn't in order, or a request waits for a later one.
    """

    def __init__(self, trace: Seq[TraceRequest]):
        _check_order(trace)
        self._trace = trace
        self._due = [(request.arrival_s, number) for number, request in enumerate(trace) if request.after is None]
        self._due.reverse()  # the next one last: taken off in constant time
        self._released: list[tuple[float, int]] = []  # a heap of those whose predecessor has ended
        self._waiting_for: dict[int, list[int]] = {}
        for number, request in enumerate(trace):
            if request.after is not None:
                self._waiting_for.setdefault(request.after, []).append(number)

    @property
    def next_s(self) -> float:
        """When the next request comes; infinite if none is due."""
        due_s = self._due[-1][0] if self._due else math.inf
        return min(due_s, self._released[0][0]) if self._released else due_s

    def pop(self) -> tuple[float, int]:
        """Time and number of the next request."""
        if self._released and (not self._due or self._released[0] < self._due[-1]):
            return heapq.heappop(self._released)
        return self._due.pop()

    def ended(self, number: int, now_s: float) -> None:
        """Let those come that waited for ``number`` to end."""
        for follower in self._waiting_for.pop(number, ()):
            heapq.heappush(self._released, (now_s + self._trace[follower].arrival_s, follower))


def request_of(number: int, request: TraceRequest, arrival_s: float) -> Request:
    """A greedy request whose prompt shares what the trace says, and whose answer has exactly the length it says."""
    return Request(
        request_id=str(number),
        prompt_token_ids=prompt_tokens(number, request),
        sampling=exactly(request.num_output_tokens),
        arrival_s=arrival_s,
    )


def prompt_tokens(number: int, request: TraceRequest) -> list[int]:
    """Token ids: odd ones for runs of its content, an even one of its own for the rest. 0 is the dummy answer."""
    tokens: list[int] = []
    for run, length in request.content:
        tokens += [_run_token(run)] * length
    own = 2 * (number + 1)
    return tokens + [own] * (request.num_prompt_tokens - len(tokens))


def answer_token(request: TraceRequest) -> int:
    """The token that its answer consists of."""
    return DUMMY_TOKEN if request.answer is None else _run_token(request.answer)


@functools.cache
def exactly(num_tokens: int) -> SamplingParams:
    """Parameters of an answer of that length."""
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def _run_token(run: int) -> int:
    return 2 * run + 1


def _check_order(trace: Seq[TraceRequest]) -> None:
    last_s, last = -math.inf, 0
    for number, request in enumerate(trace):
        if request.after is not None:
            if not 0 <= request.after < number:
                raise ConfigError(
                    f"request {number} of the trace comes after request {request.after}, which must be an earlier one",
                    param="trace",
                )
            continue
        if request.arrival_s < last_s:
            raise ConfigError(
                f"a trace must be in the order of arrivals: request {number} arrives at {request.arrival_s} s, "
                f"request {last} before it at {last_s} s",
                param="trace",
            )
        last_s, last = request.arrival_s, number
