"""View: what a policy's key function may ask, and what the scheduler learns to answer it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from numbers import Real

from jaxcb.errors import RequestError
from jaxcb.paging import PrefixCache
from jaxcb.request import Request
from jaxcb.scheduler.knobs import SchedulerLimits
from jaxcb.scheduler.sequence import Sequence
from jaxcb.validation import shown


class View:
    """The scheduler as policies see it."""

    def __init__(self, limits: SchedulerLimits, cache: PrefixCache):
        self._limits, self._cache = limits, cache
        self._observed = LengthPredictor()
        self._tenants = TenantClock()

    @property
    def priority_ageing_s(self) -> float:
        return self._limits.priority_ageing_s

    def predicted_tokens(self, sequence: Sequence) -> float:
        """Length of the sequence's answer by ``length_predictor``, at most its ``max_tokens``.

        Raises:
            RequestError: a predictor of the user's raises, or returns what is no number.
        """
        predictor, request = self._limits.length_predictor, sequence.request
        most = sequence.max_total_tokens - sequence.num_prompt_tokens
        if predictor == "max_tokens":
            return most
        return min(self._observed(request) if predictor == "observed" else _predicted(predictor, request), most)

    def cached_tokens(self, sequence: Sequence) -> int:
        """Tokens that the prefix cache would give the sequence now. Looked up again when the cache has changed."""
        version, tokens = sequence.known_beginning
        if version != self._cache.version:
            root = self._cache.root(sequence.salt)
            match = self._cache.match(root, sequence.packed, len(sequence.token_ids) - 1)
            tokens = len(match.pages) * self._limits.page_size
            sequence.known_beginning = self._cache.version, tokens
        return tokens

    def start_of_turn(self, sequence: Sequence) -> float:
        """Virtual time at which its tenant's turn comes. Asking books the turn."""
        if sequence.start_of_turn is None:
            cost = sequence.num_prompt_tokens + self.predicted_tokens(sequence)
            sequence.start_of_turn = self._tenants.book(sequence.request.tenant, cost)
        return sequence.start_of_turn

    def was_admitted(self, sequence: Sequence) -> None:
        if sequence.start_of_turn is not None:
            self._tenants.admitted(sequence.start_of_turn)

    def has_finished(self, sequence: Sequence) -> None:
        """By itself, so that its length says something."""
        self.learn(sequence.num_prompt_tokens, sequence.num_generated)

    def learn(self, num_prompt_tokens: int, num_generated: int) -> None:
        """An answer came to its end by itself after so many tokens."""
        self._observed.learn(num_prompt_tokens, num_generated)


def _predicted(predictor: Callable[[Request], float], request: Request) -> float:
    try:
        found = predictor(request)
    except Exception as error:
        raise RequestError(
            f"the length predictor raised {type(error).__name__} for this request: {error}", param="length_predictor"
        ) from error
    if not isinstance(found, Real) or math.isnan(found):
        raise RequestError(f"the length predictor must return a number, got {shown(found)}", param="length_predictor")
    return float(found)


class TenantClock:
    """Start-time fair queueing (Goyal et al. 1996) over tokens: a request starts at the later of the virtual time and
    the end of its tenant's last one, and lasts its prompt and its predicted answer. Tenants with work in the queue get
    equal shares of tokens, and one that was idle gains no credit."""

    def __init__(self) -> None:
        self._now = 0.0
        self._busy_until: dict[str, float] = defaultdict(float)

    def book(self, tenant: str, cost: float) -> float:
        """Virtual start of a request of so many tokens."""
        start = max(self._now, self._busy_until.get(tenant, 0.0))
        self._busy_until[tenant] = start + cost
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
