"""StepLoop: what the engine's thread does: it takes the inbox, steps the core, and sends on what came of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from jaxcb.engine.compile_guard import CompileGuard
from jaxcb.engine.core import EngineCore
from jaxcb.engine.inbox import Arrival, Call, Ending, Forks, Inbox, Item, Post
from jaxcb.errors import RequestError
from jaxcb.request import FinishReason
from jaxcb.scheduler import TokenEvent
from jaxcb.text.worker import TextEvent, TextWorker

logger = logging.getLogger(__name__)


class StepLoop:
    """Everything here but :meth:`fail` runs on the engine's thread."""

    def __init__(self, inbox: Inbox, core: EngineCore, text: TextWorker, guard: CompileGuard):
        self._inbox, self._core, self._text, self._guard = inbox, core, text, guard
        self._replaced: list[str] = []
        """Keys of sequences that end when the next plan is made."""

    def run(self) -> None:
        """Until the inbox says stop, or a step fails: then every request ends with the reason."""
        try:
            with self._guard.watch():
                while self._take_inbox():
                    if self._inbox.resting:
                        continue
                    self.emit(self._core.step())
                    self._inbox.progress_s = time.monotonic()
                    self._end_replaced()
                if self._inbox.error is None:
                    self._drop_all()
        except BaseException as error:
            logger.exception("the step loop failed")
            self.fail(f"the engine failed: {type(error).__name__}: {error}")

    def fail(self, message: str) -> None:
        """End every request with that error, and take no more. Any thread may call it."""
        self._inbox.fail(message)
        ends = [
            TextEvent(key, None, FinishReason.ERROR, error=message, engine_failed=True)
            for key in self._inbox.open_keys()
        ]
        self._text.put(ends)

    def emit(self, events: Sequence[TokenEvent]) -> None:
        """Send tokens and endings on to the text thread."""
        if events:
            self._text.put(
                [
                    TextEvent(
                        event.sequence.request.request_id,
                        event.token_id,
                        event.finish_reason,
                        event.stop_id,
                        event.sequence.num_cached_tokens,
                        event.sequence.num_preemptions,
                        error=event.error,
                        logprobs=event.logprobs,
                        prompt_logprobs=event.prompt_logprobs,
                        embedding=event.embedding,
                    )
                    for event in events
                ]
            )

    def _take_inbox(self) -> bool:
        """Wait for work and move what came in to the scheduler. False when it is time to stop."""
        inbox = self._inbox
        with inbox.lock:
            inbox.wait(lambda: self._core.has_work)
            count = inbox.num_items
        for _ in range(count):
            with inbox.lock:
                if inbox.error is not None:  # whoever failed it has emptied the inbox
                    break
                item = inbox.take()
                if isinstance(item, Arrival | Forks):  # at once: an id counts as waiting in one place or the other
                    self._add(item)
            self.emit(self._run(item))
        if count:
            self._core.something_came()
        with inbox.lock:
            return not inbox.stopping and inbox.error is None

    def _run(self, item: Item) -> Sequence[TokenEvent]:
        if isinstance(item, Ending):
            event = self._core.finish(item.key, item.reason)
            return [] if event is None else [event]
        if isinstance(item, Post):
            return item.function() or ()
        if isinstance(item, Call):
            self._inbox.run(item)
        return ()

    def _add(self, item: Arrival | Forks) -> None:
        """It waits for nothing; the caller holds the lock."""
        requests = item.choices if isinstance(item, Arrival) else [child for child, _ in item.children]
        try:
            if isinstance(item, Arrival):
                item.add(item.choices, item.grammar)
            else:
                self._replaced += item.parents
                for child, parent in item.children:
                    self._core.fork(child, parent)
        except RequestError as error:
            for request in requests:  # of several forks some may be in
                self._core.finish(request.request_id, FinishReason.ERROR)
            self._text.put(
                [TextEvent(choice.request_id, None, FinishReason.ERROR, error=str(error)) for choice in requests]
            )

    def _end_replaced(self) -> None:
        """Their forks have been admitted, or had their chance."""
        self._end_all(self._replaced)
        self._replaced = []

    def _drop_all(self) -> None:
        """End what still runs and wait for the steps in flight: afterwards no page is held and the device is idle."""
        self._end_all(self._inbox.open_keys())
        while self._core.has_work:
            self._core.step()  # nothing is left to plan: it commits

    def _end_all(self, keys: list[str]) -> None:
        endings = [self._core.finish(key, FinishReason.ABORT) for key in keys]
        self.emit([event for event in endings if event is not None])
