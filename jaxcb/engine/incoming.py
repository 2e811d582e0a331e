"""Incoming: requests whose prompt another engine computes: their pages, their KV as it arrives, their first token."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Protocol

from jaxcb.engine.constraints import Constraints
from jaxcb.errors import PeerError
from jaxcb.grammar import Grammar
from jaxcb.logprobs import Logprobs
from jaxcb.request import Request
from jaxcb.scheduler import Scheduler, Sequence, TokenEvent
from jaxcb.step.page_mover import PAGES_PER_MOVE
from jaxcb.step.runner import Runner


class Source(Protocol):
    """The other engine, as this one's thread calls it: nothing here may block."""

    def begin(self, request: Request, first_page: int | None) -> None:
        """Compute the prompt of a request and its first token. ``first_page``: as for :meth:`grant`, if there is room
        for its KV already."""

    def grant(self, request_id: str, first_page: int) -> None:
        """There is room now for a prompt's KV; what comes before page ``first_page`` is here."""

    def received(self, request_id: str, num_pages: int) -> None:
        """A batch of pages has been taken, or was wanted no more."""

    def drop(self, request_id: str) -> None:
        """Neither the KV nor the token is wanted any more."""


@dataclasses.dataclass(frozen=True)
class FirstToken:
    """What the other engine sampled after a prompt."""

    token_id: int
    num_cached_tokens: int
    """Prompt tokens that it found in its prefix cache."""
    logprobs: Logprobs | None = None


@dataclasses.dataclass
class HandoverTotals:
    """Since the start."""

    requests: int = 0
    """Taken up here after their prompt was computed elsewhere."""
    pages: int = 0
    taken_over: int = 0
    """Computed here after all, since the other engine failed or was too busy."""
    waited_s: float = 0.0
    """Between first tokens and the arrival of the last of their KV: what of the transfers was not hidden."""


@dataclasses.dataclass
class _Coming:
    sequence: Sequence
    source: Source
    num_pages: int
    """Of its prompt, the last one in part."""
    next_page: int | None = None
    """The first that has not arrived; they come in order. None: none are reserved yet."""
    token: FirstToken | None = None
    token_s: float = 0.0
    has_arrived: bool = False
    """Some of its pages have."""


class Incoming:
    """Everything here runs on the engine's thread.

    What a source says is not trusted: PeerError means that it makes no sense, and changes nothing.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, constraints: Constraints):
        self._scheduler, self._runner, self._constraints = scheduler, runner, constraints
        self._coming: dict[str, _Coming] = {}
        self._without_room: dict[str, _Coming] = {}
        self.totals = HandoverTotals()

    def expect(self, choices: list[Request], grammar: Grammar | None, source: Source) -> None:
        """Have another engine compute the prompt that these answers share, and the first token of the first.

        Raises:
            RequestError: as for :meth:`Handover.expect`.
        """
        sequences = self._scheduler.handover.expect(choices)
        if grammar is not None:
            for sequence in sequences:
                self._constraints.open(sequence, grammar)
        num_pages = self._scheduler.limits.num_pages(sequences[0].num_prompt_tokens)
        key, coming = choices[0].request_id, _Coming(sequences[0], source, num_pages)
        self._coming[key] = self._without_room[key] = coming
        granted = self._reserve(key, coming) if len(self._without_room) == 1 else None
        source.begin(choices[0], granted)

    def knows(self, request: Request) -> bool:
        """All but a page of the prompt is in the prefix cache: to compute the rest here is less than a hand-over."""
        known = self._scheduler.prefixes.find(request.prompt_token_ids, request.cache_salt)
        size = self._scheduler.limits.page_size
        return len(request.prompt_token_ids) - len(known) * size <= size

    def make_room(self) -> None:
        """Reserve pages for those that wait for some, first come first served."""
        while self._without_room:
            key, coming = next(iter(self._without_room.items()))
            first_page = self._reserve(key, coming)
            if first_page is None:
                return
            coming.source.grant(key, first_page)
            self._adopt_if_complete(key, coming)

    def pages(self, source: Source, request_id: str, first_page: int, num_pages: int, rows: Any) -> None:
        """A batch has arrived: rows as of :meth:`PageMover.gather`, on this engine's device or on the host, and ready
        to be read.

        Raises:
            PeerError: they are not the next ones.
        """
        coming = self._find(request_id)
        if coming is not None and coming.source is source:
            most = min(PAGES_PER_MOVE, coming.num_pages - first_page)
            if first_page != coming.next_page or not 0 < num_pages <= most:
                raise PeerError(
                    f"{num_pages} pages from {first_page} on are not what {request_id!r} waits for: it has "
                    f"{coming.next_page} of {coming.num_pages}"
                )
            self._runner.scatter_pages(coming.sequence.pages[first_page : first_page + num_pages], rows)
            coming.next_page, coming.has_arrived = first_page + num_pages, True
            self.totals.pages += num_pages
            self._adopt_if_complete(request_id, coming)
        source.received(request_id, num_pages)

    def first_token(self, source: Source, request_id: str, token: FirstToken) -> list[TokenEvent]:
        """It goes to the client at once, whatever of the KV is missing.

        Raises:
            PeerError: the token can't be this request's.
        """
        coming = self._find(request_id)
        if coming is None or coming.source is not source:
            return []
        self._check_token(request_id, coming, token)
        coming.token, coming.token_s = token, time.perf_counter()
        sequence = coming.sequence
        event = self._scheduler.handover.first_token(sequence, token.token_id, token.num_cached_tokens)
        events = [event._replace(logprobs=token.logprobs)]
        events += self._constraints.learn(events)
        if events[-1].finish_reason is not None:
            self.forget(request_id)
        else:
            self._adopt_if_complete(request_id, coming)
        return events

    def take_over(self, source: Source, request_id: str | None = None) -> None:
        """A request, or all that a source has, is computed here: the source failed, or has too much to do. It is told
        so, for it may only have been slow."""
        for key, coming in list(self._coming.items()):
            if coming.source is source and request_id in (None, key):
                self.forget(key)
                if key in self._scheduler.handover.expected:
                    self._scheduler.handover.take_over(coming.sequence)
                    self.totals.taken_over += 1

    def forget(self, request_id: str) -> None:
        """A request has ended. Harmless if nothing of it is under way."""
        coming = self._forget(request_id)
        if coming is not None:
            coming.source.drop(request_id)

    def take_back(self, source: Source, backlog_tokens: int) -> None:
        """If nothing else is to do here, take the newest request of a source that has more than ``backlog_tokens``
        before it, and compute it here: the roles of the engines follow the load."""
        scheduler = self._scheduler
        if scheduler.num_running or scheduler.roster.waiting:
            return
        waiting = [(key, coming) for key, coming in self._coming.items() if coming.source is source]
        if not waiting:
            return
        key, coming = waiting[-1]
        before = sum(earlier.sequence.num_prompt_tokens for _, earlier in waiting[:-1])
        if before > backlog_tokens and not coming.has_arrived and coming.token is None:
            self.take_over(source, key)

    def give_up_all(self) -> None:
        """Nothing that is on its way counts any more."""
        for key, coming in list(self._coming.items()):
            self.take_over(coming.source, key)

    def _reserve(self, key: str, coming: _Coming) -> int | None:
        first_page = self._scheduler.handover.reserve(coming.sequence)
        if first_page is not None:
            # Pages that made room may be on their way to host memory: they go before anything is written over them.
            self._runner.move_pages(self._scheduler.take_moves())
            coming.next_page = first_page
            del self._without_room[key]
        return first_page

    def _adopt_if_complete(self, key: str, coming: _Coming) -> None:
        if coming.token is not None and coming.next_page == coming.num_pages:
            self._forget(key)
            self._scheduler.handover.adopt(coming.sequence)
            self.totals.requests += 1
            self.totals.waited_s += time.perf_counter() - coming.token_s

    def _check_token(self, request_id: str, coming: _Coming, token: FirstToken) -> None:
        """Raise PeerError unless it may be the first of an answer to this request."""
        sequence, sampling = coming.sequence, coming.sequence.request.sampling
        vocab_size = self._runner.spec.vocab_size
        wanted = vocab_size if sampling.logprobs == -1 else sampling.logprobs
        given = None if token.logprobs is None else token.logprobs.top_ids.shape[1]
        wrong = {
            "a second one": coming.token is not None,
            f"id {token.token_id}": not 0 <= token.token_id < vocab_size,
            f"{token.num_cached_tokens} tokens found": not 0 <= token.num_cached_tokens <= sequence.num_prompt_tokens,
            f"{given} alternatives": given != wanted,
        }
        if not any(wrong.values()):
            wrong["one that its grammar forbids"] = not self._constraints.permit(sequence, token.token_id)
        if what := ", ".join(name for name, is_so in wrong.items() if is_so):
            raise PeerError(f"the first token of {request_id!r} can't be this: {what}")

    @property
    def num_coming(self) -> int:
        """Requests that sources have. Any thread may ask."""
        return len(self._coming)

    def _find(self, request_id: str) -> _Coming | None:
        """The scheduler may have taken it over, since its KV counts no more."""
        if request_id in self._coming and request_id not in self._scheduler.handover.expected:
            self.forget(request_id)
        return self._coming.get(request_id)

    def _forget(self, key: str) -> _Coming | None:
        self._without_room.pop(key, None)
        return self._coming.pop(key, None)
