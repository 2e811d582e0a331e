"""Policies: in which order waiting sequences are admitted.

A policy is a key function: the waiting sequence with the smallest key is next, and equal keys go in order of arrival.
A key of your own takes the sequence and a :class:`View` of what the scheduler knows; this one lets short prompts go
first, but none more than ten seconds before its turn:

    def short_prompts_first(sequence, view):
        return sequence.request.arrival_s + min(10.0, 0.01 * sequence.num_prompt_tokens)

    EngineConfig(policy=short_prompts_first)

It is called once, when the sequence is queued, so a queue of any length costs nothing a step. Preempted sequences stand
before all others and keep their order.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from jaxcb.request import Request

if TYPE_CHECKING:
    from jaxcb.scheduler.sequence import Sequence

Key = Callable[["Sequence", "View"], Any]


@dataclasses.dataclass(frozen=True)
class View:
    """What a key function may ask about a sequence."""

    predicted_tokens: Callable[[Sequence], float]
    """Length of its answer by ``length_predictor``, at most its ``max_tokens``."""
    cached_tokens: Callable[[Sequence], int]
    """Tokens that the prefix cache would give it now."""
    start_of_turn: Callable[[Sequence], float]
    """Virtual time at which its tenant's turn comes (see :class:`TenantClock`). Asking books the turn."""
    priority_ageing_s: float


@dataclasses.dataclass(frozen=True)
class Policy:
    """A key and how it is used."""

    key: Key
    may_starve: bool = True
    """Newcomers can stand before older ones without end: ``max_overtakes`` applies."""
    preempts: bool = False
    """A head of a lower ``Request.priority`` takes the place of running work that stands behind it in this order."""
    resumes_first: bool = True
    """Preempted sequences come before all others. False: their key alone says so."""
    looks_at: int = 0
    """The key changes while sequences wait: it is taken anew, for the so many oldest. 0: it is taken once."""


def _fcfs(sequence: Sequence, view: View) -> Any:
    return 0


def _shortest_first(sequence: Sequence, view: View) -> Any:
    """Shortest job first, by what it has still to generate; the shorter prompt among equals."""
    return view.predicted_tokens(sequence), sequence.num_prompt_tokens


def _priority(sequence: Sequence, view: View) -> Any:
    """Ageing without a clock: priority - waited / ageing orders as priority * ageing + arrival does."""
    request, ageing_s = sequence.request, view.priority_ageing_s
    if math.isinf(ageing_s):
        return request.priority, request.arrival_s
    return request.priority * ageing_s + request.arrival_s, 0.0


def _longest_prefix_first(sequence: Sequence, view: View) -> Any:
    """SGLang's longest-prefix-match order (Zheng et al. 2024, section 3)."""
    return -view.cached_tokens(sequence)


def _deadline(sequence: Sequence, view: View) -> Any:
    """Earliest deadline of the first token; requests without one come after those with one."""
    request = sequence.request
    return math.inf if request.ttft_deadline_s is None else request.arrival_s + request.ttft_deadline_s


def _fair(sequence: Sequence, view: View) -> Any:
    return view.start_of_turn(sequence)


POLICIES: Mapping[str, Policy] = {
    "fcfs": Policy(_fcfs, may_starve=False),
    "sjf": Policy(_shortest_first),
    "priority": Policy(_priority, may_starve=False, preempts=True, resumes_first=False),
    "prefix": Policy(_longest_prefix_first, looks_at=64),
    "deadline": Policy(_deadline),
    "fair": Policy(_fair, may_starve=False),
}


def policy_of(policy: str | Key) -> Policy:
    """A built-in policy by name, or one around a function of the user's."""
    return POLICIES[policy] if isinstance(policy, str) else Policy(policy)


class TenantClock:
    """Start-time fair queueing (Goyal et al. 1996) over tokens: a request starts at the later of the virtual time and
    the end of its tenant's last one, and lasts its prompt and its predicted answer. Tenants with work in the queue get
    equal shares of tokens, and one that was idle gains no credit."""

    def __init__(self, cost: Callable[[Sequence], float]):
        self._cost = cost
        self._now = 0.0
        self._busy_until: dict[str, float] = defaultdict(float)

    def book(self, sequence: Sequence) -> float:
        """Virtual start of a sequence that is queued."""
        tenant = sequence.request.tenant
        start = max(self._now, self._busy_until.get(tenant, 0.0))
        self._busy_until[tenant] = start + self._cost(sequence)
        return start

    def admitted(self, start: float) -> None:
        """Virtual time is that of the last admission. Tenants that are idle by then are forgotten."""
        self._now = max(self._now, start)
        if len(self._busy_until) > 1024:
            self._busy_until = {name: end for name, end in self._busy_until.items() if end > self._now}


class LengthPredictor:
    """Predicts the length of an answer from those of finished requests with a prompt of the same length class.

    A class is a power of two of prompt tokens; its mean forgets, so that it follows the traffic.
    """

    FORGETTING = 0.05

    def __init__(self) -> None:
        self._mean: dict[int, float] = {}

    def __call__(self, request: Request) -> float:
        mean, most = self._mean.get(len(request.prompt_token_ids).bit_length()), request.sampling.max_tokens
        if mean is None:
            return math.inf if most is None else most
        return mean if most is None else min(mean, most)

    def learn(self, num_prompt_tokens: int, num_generated: int) -> None:
        """A request finished by itself."""
        length_class = num_prompt_tokens.bit_length()
        mean = self._mean.get(length_class, float(num_generated))
        self._mean[length_class] = mean + self.FORGETTING * (num_generated - mean)
