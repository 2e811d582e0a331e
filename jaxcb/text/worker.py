"""TextWorker: the thread that turns committed tokens into text, finds stop strings and feeds the streams.

The engine's thread only puts a step's events on a queue; however slow text is, the device doesn't wait for it. A stop
string is therefore found a step or two late: the tokens after it are discarded here, and the engine is told.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from jaxcb.logprobs import Logprobs
from jaxcb.request import FinishReason, Request
from jaxcb.text.detokenizer import Detokenizer
from jaxcb.text.stops import StopMatcher
from jaxcb.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Sink = Callable[[list[tuple[str, "TextUpdate"]]], None]
"""Takes the updates of one step, each with its request's key, on the worker's thread."""


@dataclasses.dataclass(frozen=True, slots=True)
class TextEvent:
    """A token of a request, or its end (``token_id`` None), as the engine committed it.

    ``key`` is the engine's own name of the request: ids are chosen by clients and may be used again while late events
    of an ended request are still under way.
    """

    key: str
    token_id: int | None
    finish_reason: FinishReason | None = None
    stop_id: int | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    error: str | None = None
    engine_failed: bool = False
    """The error ends every request of the engine."""
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    embedding: Float[np.ndarray, "E"] | None = None


@dataclasses.dataclass(slots=True)
class TextUpdate:
    """What was added to a request's answer since the update before, and its end if it has ended."""

    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    error: str | None
    engine_failed: bool
    num_cached_tokens: int
    num_preemptions: int
    first_token_s: float | None
    finished_s: float | None
    logprobs: list[Logprobs]
    """Of ``token_ids``, if they were asked for."""
    prompt_logprobs: Logprobs | None
    embedding: Float[np.ndarray, "E"] | None

    @classmethod
    def ending(
        cls, reason: FinishReason, now_s: float, error: str | None = None, *, engine_failed: bool = False
    ) -> TextUpdate:
        """The end of a request that no engine has taken up."""
        return cls(
            token_ids=[],
            text="",
            finish_reason=reason,
            stop_reason=None,
            error=error,
            engine_failed=engine_failed,
            num_cached_tokens=0,
            num_preemptions=0,
            first_token_s=None,
            finished_s=now_s,
            logprobs=[],
            prompt_logprobs=None,
            embedding=None,
        )

    def extend(self, later: TextUpdate) -> None:
        """Merge the update that follows this one into it."""
        later.token_ids = self.token_ids + later.token_ids
        later.text = self.text + later.text
        later.logprobs = self.logprobs + later.logprobs
        later.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        later.embedding = self.embedding if later.embedding is None else later.embedding
        for field in self.__slots__:
            setattr(self, field, getattr(later, field))


class _TextState:
    """The text side of one open request."""

    def __init__(self, request: Request, tokenizer: Tokenizer):
        sampling = request.sampling
        self.request = request
        self.detokenizer = Detokenizer(tokenizer, request.prompt_token_ids, sampling.skip_special_tokens)
        self.matcher = StopMatcher(sampling.stop, sampling.include_stop_str_in_output)
        self.num_tokens = 0
        self.first_token_s: float | None = None

    def advance(self, event: TextEvent, now_s: float) -> TextUpdate:
        sampling = self.request.sampling
        reason: FinishReason | None = event.finish_reason
        stop: int | str | None = event.stop_id
        piece = ""
        if event.token_id is not None:
            self.num_tokens += 1
            if self.first_token_s is None:
                self.first_token_s = now_s
            if reason is not FinishReason.STOP or sampling.include_stop_str_in_output:
                piece = self.detokenizer.add([event.token_id])
            # else: the token that ended the sequence is no part of the text
        if reason is not None:
            piece += self.detokenizer.flush()
        dropped = reason in (FinishReason.ABORT, FinishReason.ERROR)
        piece, matched = self.matcher.add(piece, armed=self.num_tokens >= sampling.min_tokens and not dropped)
        if matched is not None:
            reason, stop = FinishReason.STOP, matched
        elif reason is not None:
            piece += self.matcher.flush()
        return TextUpdate(
            token_ids=[] if event.token_id is None else [event.token_id],
            text=piece,
            finish_reason=reason,
            stop_reason=stop,
            error=event.error,
            engine_failed=event.engine_failed,
            num_cached_tokens=event.num_cached_tokens,
            num_preemptions=event.num_preemptions,
            first_token_s=self.first_token_s,
            finished_s=None if reason is None else now_s,
            logprobs=[] if event.logprobs is None else [event.logprobs],
            prompt_logprobs=event.prompt_logprobs,
            embedding=event.embedding,
        )


class TextWorker:
    """``on_stop(key)`` is called when a stop string ends a request that the engine still runs; ``on_batch(start_s,
    end_s, num_events)``, on the clock of ``time.perf_counter()``, when the events of a step are delivered."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        sink: Sink,
        on_stop: Callable[[str], None],
        on_batch: Callable[[float, float, int], None] | None = None,
    ):
        self._tokenizer, self._sink, self._on_stop, self._on_batch = tokenizer, sink, on_stop, on_batch
        self._queue: queue.SimpleQueue[list[TextEvent] | tuple[str, Request] | None] = queue.SimpleQueue()
        self._open: dict[str, _TextState] = {}
        self._thread = threading.Thread(target=self._run, name="jaxcb-text", daemon=True)
        self._thread.start()

    def open(self, key: str, request: Request) -> None:
        """Announce a request before its first event."""
        self._queue.put((key, request))

    def put(self, events: list[TextEvent]) -> None:
        """Events of one step, in order."""
        self._queue.put(events)

    def close(self) -> None:
        """Work off what is queued, then end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, tuple):
                key, request = item
                self._open[key] = _TextState(request, self._tokenizer)
            else:
                start_s = time.perf_counter()
                self._sink(self._updates(item))
                if self._on_batch is not None:
                    self._on_batch(start_s, time.perf_counter(), len(item))

    def _updates(self, events: list[TextEvent]) -> list[tuple[str, TextUpdate]]:
        now_s = time.monotonic()
        updates = []
        for event in events:
            state = self._open.get(event.key)
            if state is None:
                continue  # a stop string ended it while these tokens were under way
            update = state.advance(event, now_s)
            updates.append((event.key, update))
            if update.finish_reason is not None:
                del self._open[event.key]
                if event.finish_reason is None:
                    self._on_stop(event.key)
        return updates
