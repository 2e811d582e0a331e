"""SharedQueue: requests that no engine has taken yet, in the order of the scheduling policy.

It is the scheduler's own queue, under its own policies and knobs (``policy``, ``length_predictor``,
``priority_ageing_s``, ``max_overtakes``, ``max_passes``). One thing that a policy may ask can't be known here: what an
engine's prefix cache holds. ``View.cached_tokens`` is 0, so "prefix" is the order of arrival in this queue; that
requests meet their beginnings again is the work of the routing, and of the engine's own queue.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq

from jaxcb.cluster.beginnings import blocks_of
from jaxcb.engine import OutputStream
from jaxcb.paging import PrefixCache
from jaxcb.request import Request
from jaxcb.scheduler import SchedulerLimits, Sequence
from jaxcb.scheduler.admission import MAX_SET_ASIDE
from jaxcb.scheduler.policy import policy_of
from jaxcb.scheduler.queue import WaitingQueue
from jaxcb.scheduler.view import View


@dataclasses.dataclass(eq=False)
class Entry:
    """A request that waits, or that an engine was given. ``key`` is what it goes by inside the engines."""

    key: str
    request: Request
    streams: list[OutputStream]
    """Of all its answers."""
    sequence: Sequence
    """What policies look at."""
    num_pages: int
    """Pages of the prompt and one token more."""
    blocks: list[int]
    was_retried: bool = False


class SharedQueue:
    """Not thread-safe."""

    def __init__(self, limits: SchedulerLimits):
        self._limits = limits
        self._policy = policy_of(limits.policy)
        self._view = View(limits, PrefixCache(1, limits.page_size, enabled=False))
        self._queue = WaitingQueue(self._policy, self._key, limits.max_overtakes)
        self._entries: dict[str, Entry] = {}
        self._num_made = self._num_set_aside = 0

    @property
    def preempts(self) -> bool:
        """An engine makes room for a request of a lower ``Request.priority``."""
        return self._policy.preempts

    @property
    def num_answers(self) -> int:
        """That are waited for."""
        return sum(len(entry.streams) for entry in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, entry: object) -> bool:
        return isinstance(entry, Entry) and self._entries.get(entry.key) is entry

    @property
    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    def add(self, request: Request, streams: Seq[OutputStream]) -> Entry:
        """Queue a newcomer.

        Raises:
            RequestError: a policy or a predictor of the user's fails for it; it isn't queued.
        """
        entry = self._entry(request, streams, self._num_made)
        self._queue.add(entry.sequence)
        self._entries[entry.key] = entry
        return entry

    def part(self, whole: Entry, stream: OutputStream, *, is_retry: bool = False) -> Entry:
        """Queue one answer of a request by itself: where the request stood, as others of it were dropped, or, as its
        engine has failed, before what came later."""
        entry = self._entry(stream.request, [stream], whole.sequence.ticket)
        entry.sequence.rank, entry.was_retried = whole.sequence.rank, whole.was_retried or is_retry
        if is_retry:
            self.put_back(entry)
        else:
            self._queue.put_back(entry.sequence)
            self._entries[entry.key] = entry
        return entry

    def put_back(self, entry: Entry) -> None:
        """What was taken found no place after all."""
        self._queue.requeue(entry.sequence)
        self._entries[entry.key] = entry

    def head(self) -> Entry | None:
        """Who is next."""
        sequence = self._queue.head()
        return None if sequence is None else self._entries[sequence.request.request_id]

    def take(self, entry: Entry) -> None:
        """An engine is given it."""
        self.drop(entry)
        self._queue.was_admitted(entry.sequence)
        self._view.was_admitted(entry.sequence)

    def drop(self, entry: Entry) -> None:
        """Nobody waits for it any more."""
        self._queue.remove(entry.sequence)
        del self._entries[entry.key]

    def pass_by(self, entry: Entry) -> bool:
        """Whether those behind this head, which finds no room, may be looked at (``max_passes``), until
        :meth:`restore`."""
        if entry.sequence.num_overtaken >= self._limits.max_passes or self._num_set_aside >= MAX_SET_ASIDE:
            return False
        self._queue.set_aside(entry.sequence)
        self._num_set_aside += 1
        return True

    def restore(self) -> None:
        """Offer everyone again."""
        self._queue.restore()
        self._num_set_aside = 0

    def learn(self, entry: Entry, num_generated: int) -> None:
        """An answer came to its end by itself."""
        self._view.learn(entry.sequence.num_prompt_tokens, num_generated)

    def _entry(self, request: Request, streams: Seq[OutputStream], ticket: int) -> Entry:
        key = f"{self._num_made}-{request.request_id}"
        self._num_made += 1
        token_ids, max_tokens = list(request.prompt_token_ids), request.sampling.max_tokens
        total = self._limits.max_model_len if max_tokens is None else len(token_ids) + max_tokens
        sequence = Sequence(
            request=dataclasses.replace(request, request_id=key),
            token_ids=token_ids,
            max_total_tokens=total,
            end_ids=frozenset(),
            ticket=ticket,
        )
        blocks = blocks_of(request) if self._limits.enable_prefix_caching else []
        return Entry(key, request, list(streams), sequence, self._limits.num_pages(len(token_ids) + 1), blocks)

    def _key(self, sequence: Sequence) -> object:
        return self._policy.key(sequence, self._view)
