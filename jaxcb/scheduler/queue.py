"""WaitingQueue: sequences by rank in a heap, and by age. Every operation is O(log n) or better."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from jaxcb.scheduler.policy import Policy
from jaxcb.scheduler.sequence import Sequence

KeyOf = Callable[[Sequence], Any]


class WaitingQueue:
    """Sequences that are not running.

    Arguments:
        policy: how it is sorted.
        key_of: the policy's key of a sequence.
        max_overtakes: admissions after which the oldest sequence is next, where the policy could starve it.
    """

    def __init__(self, policy: Policy, key_of: KeyOf, max_overtakes: int):
        self._policy, self._key_of, self._max_overtakes = policy, key_of, max_overtakes
        self._by_age: OrderedDict[str, Sequence] = OrderedDict()  # every waiting sequence, in the order of its queueing
        # May hold some that have left: see _is_here. Of equal ranks (answers that were one request) the first is first.
        self._heap: list[tuple[tuple[Any, ...], int, Sequence]] = []
        self._num_pushed = 0
        self._set_aside: dict[Sequence, bool] = {}  # not offered until restore(); True: it was taken out of the heap
        self._held_back: set[Sequence] = set()  # forks that wait for their parent's prompt

    def __len__(self) -> int:
        return len(self._by_age)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_age.values())

    def get(self, request_id: str) -> Sequence | None:
        return self._by_age.get(request_id)

    def add(self, sequence: Sequence, *, held_back: bool = False) -> None:
        """Queue a newcomer. One that is held back isn't offered before :meth:`let_go`.

        Raises:
            RequestError: a policy or a predictor of the user's fails for it; it isn't queued.
        """
        self.rank(sequence)
        self._by_age[sequence.request.request_id] = sequence
        if held_back:
            self._held_back.add(sequence)
        else:
            self._push(sequence)

    def rank(self, sequence: Sequence) -> None:
        """What a newcomer is sorted by. Errors as for :meth:`add`."""
        sequence.rank = True, 0 if self._policy.looks_at else self._key_of(sequence), sequence.ticket

    def let_go(self, sequence: Sequence) -> None:
        """A sequence that was held back may be offered. Harmless if it has left."""
        if sequence in self._held_back:
            self._held_back.discard(sequence)
            self._push(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """Take back a preempted sequence: no newcomer of its class overtakes it."""
        _, key, ticket = sequence.rank
        sequence.rank = not self._policy.resumes_first, key, ticket
        self.put_back(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Queue what was here before, in the place that its rank gives it."""
        self._by_age[sequence.request.request_id] = sequence
        self._by_age.move_to_end(sequence.request.request_id, last=False)
        self._push(sequence)

    def remove(self, sequence: Sequence) -> None:
        """It was admitted or has ended."""
        del self._by_age[sequence.request.request_id]
        self._set_aside.pop(sequence, None)
        self._held_back.discard(sequence)
        if len(self._heap) > 2 * len(self._by_age) + 64:
            self._heap = [entry for entry in self._heap if self._is_here(entry[0], entry[2])]
            heapq.heapify(self._heap)

    def head(self) -> Sequence | None:
        """Who is next."""
        oldest = next(iter(self._by_age.values()), None)
        if oldest is None:
            return None
        if oldest.num_overtaken >= self._max_overtakes and self._policy.may_starve and self._offers(oldest):
            return oldest
        if self._policy.looks_at:
            return self._look()
        while self._heap:
            rank, _, sequence = self._heap[0]
            if self._is_here(rank, sequence):
                if sequence not in self._set_aside:
                    return sequence
                self._set_aside[sequence] = True
            heapq.heappop(self._heap)
        return None

    def was_admitted(self, sequence: Sequence) -> None:
        """Count whom this admission, of one that has been removed, overtook."""
        overtaken = set(self._set_aside)
        oldest = next(iter(self._by_age.values()), None)
        if oldest is not None:
            overtaken.add(oldest)
        for other in overtaken:
            other.num_overtaken += other.ticket < sequence.ticket

    def set_aside(self, sequence: Sequence) -> None:
        """Offer others than this head until :meth:`restore`."""
        self._set_aside[sequence] = False

    def restore(self) -> None:
        """Offer everyone again."""
        for sequence, taken_out in self._set_aside.items():
            if taken_out:
                self._push(sequence)
        self._set_aside.clear()

    def _push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (sequence.rank, self._num_pushed, sequence))
        self._num_pushed += 1

    def _is_here(self, rank: tuple[Any, ...], sequence: Sequence) -> bool:
        return self._by_age.get(sequence.request.request_id) is sequence and sequence.rank is rank

    def _offers(self, sequence: Sequence) -> bool:
        return sequence not in self._set_aside and sequence not in self._held_back

    def _look(self) -> Sequence | None:
        """The smallest key among the oldest."""
        oldest = (sequence for sequence in self._by_age.values() if self._offers(sequence))
        candidates = list(islice(oldest, self._policy.looks_at))
        return min(candidates, key=lambda s: (s.rank[0], self._key_of(s), s.ticket), default=None)
