"""Policies: in which order waiting sequences are admitted.

A policy is a key function: the waiting sequence with the smallest key is next, and equal keys go in order of arrival.
A key of your own takes the sequence and a ``View`` of what the scheduler knows (``view.py``); this one lets short
prompts go first, but none more than ten seconds before its turn:

    def short_prompts_first(sequence, view):
        return sequence.request.arrival_s + min(10.0, 0.01 * sequence.num_prompt_tokens)

    EngineConfig(policy=short_prompts_first)

It is called once, when the sequence is queued, so a queue of any length costs nothing a step. Preempted sequences stand
before all others and keep their order. A key is a number or a tuple of numbers; a request for which the function
raises, or returns anything else, is refused with an error that says so, and the others go on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

from jaxcb.errors import RequestError
from jaxcb.validation import shown

if TYPE_CHECKING:
    from jaxcb.scheduler.sequence import Sequence
    from jaxcb.scheduler.view import View

Key = Callable[["Sequence", "View"], Any]


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
    return POLICIES[policy] if isinstance(policy, str) else Policy(_checked(policy))


def _checked(function: Key) -> Key:
    """A key of the user's: what goes wrong in it is an error of the request alone, and any two keys can be compared."""

    def key(sequence: Sequence, view: View) -> tuple[Any, ...]:
        try:
            found = function(sequence, view)
        except Exception as error:
            raise RequestError(
                f"the policy function raised {type(error).__name__} for this request: {error}", param="policy"
            ) from error
        numbers = found if isinstance(found, tuple) else (found,)
        if not all(isinstance(number, Real) and number == number for number in numbers):  # NaN equals nothing
            raise RequestError(
                f"the policy function must return a number or a tuple of numbers, got {shown(found)}", param="policy"
            )
        return numbers

    return key
