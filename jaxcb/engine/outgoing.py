"""Outgoing: the KV of prompts on its way to an engine that generates, chunk by chunk.

A chunk's pages are gathered behind the step that fills them, before the next step is launched, so that they travel
while that one runs. Pages are lent from the launch of that step on: whatever becomes of the sequence, they stay until
the other side has acknowledged them all, or wants them no more.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any, Protocol

from jaxcb.errors import PeerError, RequestError
from jaxcb.scheduler import Scheduler, StepPlan
from jaxcb.step.page_mover import PAGES_PER_MOVE
from jaxcb.step.runner import Runner

MAX_UNACKNOWLEDGED = 8
"""Batches on their way to one engine: each holds device memory, or a place in shared memory, until it is received."""


class Sink(Protocol):
    """Where batches go. Called on the engine's thread, so it hands them on to a thread of its own."""

    def send(self, request_id: str, first_page: int, num_pages: int, rows: Any) -> None:
        """``num_pages`` pages of a prompt, from index ``first_page`` on, stand in the first rows of a device array
        [PAGES_PER_MOVE, L, 2, page_size, K, D] that may not be computed yet."""

    def lost(self, request_id: str) -> None:
        """A prompt's KV counts no more: nothing of it is sent from now on."""


@dataclasses.dataclass
class _Prompt:
    """One prompt's KV."""

    request_id: str
    """What the other side calls it."""
    num_pages: int
    """Of all of it, the last one in part."""
    next_page: int | None
    """The first that has to be sent yet; None: the other side has no room so far."""
    pages: list[int] = dataclasses.field(default_factory=list)
    """Those that steps have filled, from the first one on."""
    num_missing: int = 0
    """Sent, or to be sent, and not acknowledged; counts from the grant on."""


class Outgoing:
    """To one other engine. Everything here runs on the engine's thread.

    What the other side says is not trusted: PeerError means that it makes no sense, and changes nothing.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, sink: Sink):
        self._scheduler, self._runner, self._sink = scheduler, runner, sink
        self._prompts: dict[str, _Prompt] = {}  # by the sequence's request id
        self._key_of: dict[str, str] = {}  # the other side's id -> the sequence's
        self._on_their_way: deque[tuple[str, int]] = deque()
        """Batches, oldest first: the other side's id, and how many pages."""

    def begin(self, key: str, request_id: str, num_prompt_tokens: int, first_page: int | None) -> None:
        """The sequence ``key`` is about to be queued, and its KV goes out.

        Arguments:
            request_id: what the other side calls it.
            first_page: as for :meth:`grant`; None: the grant comes later.

        Raises:
            RequestError: the other side has another prompt of this name here, or can't have so many pages.
        """
        num_pages = self._scheduler.limits.num_pages(num_prompt_tokens)
        if request_id in self._key_of:
            raise RequestError(f"request id {request_id!r} is in use", param="request_id")
        if first_page is not None and first_page > num_pages:
            raise RequestError(f"the prompt has {num_pages} pages, {first_page} are there", param="first_page")
        self._prompts[key] = _Prompt(request_id, num_pages, None)
        self._key_of[request_id] = key
        if first_page is not None:
            self.grant(request_id, first_page)

    def grant(self, request_id: str, first_page: int) -> None:
        """The other side has pages for a prompt, and the content of those before ``first_page``. Harmless for one that
        is not here."""
        key = self._key_of.get(request_id)
        if key is not None:
            prompt = self._prompts[key]
            if prompt.next_page is not None or first_page > prompt.num_pages:
                raise PeerError(f"pages from {first_page} on can't be granted, of {prompt.num_pages} to {request_id!r}")
            prompt.next_page, prompt.num_missing = first_page, prompt.num_pages - first_page
            self._send()
            self._end_if_received(key)

    def received(self, request_id: str, num_pages: int) -> None:
        """The other side has the oldest batch that is on its way, of a prompt that may be gone."""
        if not self._on_their_way or self._on_their_way[0] != (request_id, num_pages):
            raise PeerError(f"{num_pages} pages of {request_id!r} are acknowledged, and are not what it was sent next")
        self._on_their_way.popleft()
        key = self._key_of.get(request_id)
        if key is not None:
            self._prompts[key].num_missing -= num_pages
            self._end_if_received(key)
        self._send()

    def drop(self, request_id: str) -> None:
        """Nobody wants a prompt's KV any more. Harmless for one that is not here."""
        key = self._key_of.pop(request_id, None)
        if key is not None:
            del self._prompts[key]
            self._scheduler.handover.returned(key)

    def drop_all(self) -> None:
        """The other side is gone."""
        for request_id in list(self._key_of):
            self.drop(request_id)

    def lose_all(self) -> None:
        """No KV counts any more: the weights change, or the memory of the pages is given back."""
        for request_id in list(self._key_of):
            self.drop(request_id)
            self._sink.lost(request_id)

    def launched(self, plan: StepPlan) -> None:
        """A step is on its way: the pages that it fills can be gathered behind it."""
        if not self._prompts:
            return
        size = self._scheduler.limits.page_size
        for row in plan.chunks:
            key = row.sequence.request.request_id
            prompt = self._prompts.get(key)
            if prompt is None:
                continue
            whole = row.context_len >= row.sequence.num_prompt_tokens
            filled = prompt.num_pages if whole else row.context_len // size
            new = row.sequence.pages[len(prompt.pages) : filled]
            self._scheduler.handover.lend(key, new)
            prompt.pages += new
        self._send()

    def _send(self) -> None:
        """As much as is filled and wanted, and as may be on its way; first come, first served."""
        for prompt in self._prompts.values():
            while prompt.next_page is not None and prompt.next_page < len(prompt.pages) and self._may_send:
                batch = prompt.pages[prompt.next_page : prompt.next_page + PAGES_PER_MOVE]
                self._on_their_way.append((prompt.request_id, len(batch)))
                self._sink.send(prompt.request_id, prompt.next_page, len(batch), self._runner.gather_pages(batch))
                prompt.next_page += len(batch)

    @property
    def _may_send(self) -> bool:
        return len(self._on_their_way) < MAX_UNACKNOWLEDGED

    def _end_if_received(self, key: str) -> None:
        prompt = self._prompts[key]
        if prompt.next_page is not None and not prompt.num_missing:
            self.drop(prompt.request_id)
