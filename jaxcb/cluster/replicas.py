"""Replicas: data parallel engines behind one queue.

A request waits in one queue, in the order of the scheduling policy, until an engine has room for it: so none is bound
to a busy engine while another idles. Of the engines with room the one is chosen that was sent the longest beginning
of its prompt before, so that the pages are there, unless that one has much more to do than the idlest.

What an engine that fails was given and has sent no token of is queued again, once, and computed from its prompt on
another engine. What has sent tokens ends with the engine's error. The others go on.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

from jaxcb.cluster.beginnings import BLOCK_TOKENS, Beginnings
from jaxcb.cluster.choice import choose
from jaxcb.cluster.member import Member
from jaxcb.cluster.shared_queue import Entry, SharedQueue
from jaxcb.config import EngineConfig
from jaxcb.engine import Engine, EngineStats, OutputStream, ServingEngine, prepare
from jaxcb.engine.stream import deliver, nobody, running_loop
from jaxcb.errors import ConfigError, EngineStoppedError, QueueFullError, RequestError
from jaxcb.request import FinishReason, Request
from jaxcb.structured_outputs import StructuredOutputs
from jaxcb.text.worker import TextUpdate

logger = logging.getLogger(__name__)

POLL_S = 0.01
"""Between two looks at the engines while something waits that none had room for: prompts that they admit free room
without saying so."""


class Replicas(ServingEngine):
    """Over running engines of the same model, which belong to it from now on: :meth:`shutdown` ends them too. The queue
    takes ``config.max_waiting`` answers, those that wait inside the engines among them.

    Raises:
        ConfigError: there is no engine, or they serve different models.
    """

    def __init__(self, engines: Sequence[Engine], *, asked_for: EngineConfig | None = None):
        if not engines:
            raise ConfigError("a cluster needs at least one engine", param="engines")
        if len({engine.name for engine in engines}) > 1:
            names = ", ".join(sorted({engine.name for engine in engines}))
            raise ConfigError(f"the engines of a cluster serve different models: {names}", param="engines")
        self.engines = tuple(engines)
        first = engines[0]
        self.name, self.spec, self.tokenizer = first.name, first.spec, first.tokenizer
        self.sampling_defaults = first.sampling_defaults
        self.asked_for = first.asked_for if asked_for is None else asked_for
        self.config = first.config if asked_for is None else _of_all(first.config, asked_for)
        self._members = [Member(engine) for engine in engines]
        self._queue = SharedQueue(first.limits)
        pages = sum(engine.limits.num_kv_pages + engine.limits.num_host_pages for engine in engines)
        self._beginnings = Beginnings(max(pages * first.limits.page_size // BLOCK_TOKENS, 1))
        self._random = random.Random(self.config.seed)
        self._at: weakref.WeakKeyDictionary[OutputStream, Member] = weakref.WeakKeyDictionary()
        """Where a stream's answer runs."""
        self._open: dict[str, set[OutputStream]] = {}
        """By the clients' ids."""
        self._finished: Counter[str] = Counter()
        """Ends of what no engine was given, by reason."""
        self._changed = threading.Condition()
        """Guards all of it, and is told what may make room."""
        self._accepting, self._paused, self._stopping = True, False, False
        self._thread = threading.Thread(target=self._route, name="jaxcb-router", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ requests

    def check_request(self, request: Request) -> None:
        """Raise RequestError if one of the engines could never run the request."""
        for engine in self.engines:
            engine.check_request(request)

    def submit_choices(self, request: Request, *, blocking: bool = False) -> list[OutputStream]:
        self.check_request(request)
        request = prepare.with_words_and_states(request, self.tokenizer, self.config.logits_processors)
        if request.sampling.structured_outputs is not None:
            self.compile_grammar(request.sampling.structured_outputs)
        loop = None if blocking else running_loop()
        with self._changed:
            self._check_open(request)
            request = prepare.with_seed(request, self._random)
            streams = [
                OutputStream(choice, nobody, loop, index) for index, choice in enumerate(prepare.choices_of(request))
            ]
            entry = self._queue.add(request, streams)
            self._wait(entry)
            self._open[request.request_id] = set(streams)
            self._hand_out()
            self._changed.notify_all()  # the router looks again where it found no room
        return streams

    def _check_open(self, request: Request) -> None:
        """Raise if nothing is taken now. The caller holds the lock."""
        if not self.accepting:
            raise EngineStoppedError("no engine is running")
        if request.request_id in self._open:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        limit = self.config.max_waiting
        if limit is None:
            return
        num_waiting = self._queue.num_answers + sum(engine.stats().num_waiting for engine in self.engines)
        if num_waiting + request.sampling.num_choices > limit:
            raise QueueFullError(f"{num_waiting} requests are waiting, the limit is {limit}")

    def fork(
        self, parents: Sequence[OutputStream], children: Sequence[tuple[Request, int]], *, blocking: bool = False
    ) -> list[OutputStream]:
        with self._changed:
            member = self._at[parents[0]]
        streams = member.engine.fork(parents, children, blocking=blocking)
        with self._changed:
            self._at.update(dict.fromkeys(streams, member))
        return streams

    def compile_grammar(self, structured: StructuredOutputs) -> None:
        for engine in self.engines:
            engine.compile_grammar(structured)

    def abort(self, request_id: str) -> None:
        with self._changed:
            beams = [stream for stream in self._at if stream.request.request_id == request_id]  # forked in the engines
            streams = {*self._open.get(request_id, ()), *beams}
        for stream in streams:
            stream.abort()

    def _abort(self, entry: Entry, stream: OutputStream) -> None:
        """Of an answer that stood in the queue when its stream learned to end it so."""
        with self._changed:
            was_waiting = entry in self._queue
            if was_waiting:
                self._queue.drop(entry)
                for other in entry.streams:
                    if other is not stream:
                        self._wait(self._queue.part(entry, other))
                self._end_unserved(stream, FinishReason.ABORT)
        if not was_waiting:
            stream.abort()  # an engine has it by now, and told the stream so

    def _wait(self, entry: Entry) -> None:
        """An entry of the queue ends its streams' requests from now on."""
        for stream in entry.streams:
            stream.at_end = None
            stream.given_to(functools.partial(self._abort, entry, stream))

    # ------------------------------------------------------------------ routing

    def _route(self) -> None:
        """The router's thread: when something may have made room, hand out."""
        with self._changed:
            while not self._stopping:
                self._hand_out()
                self._changed.wait(POLL_S if self._queue else None)

    def _hand_out(self) -> None:
        """Give engines what they have room for. Whatever fails, nobody waits for ever. The caller holds the lock."""
        if self._paused:
            return
        try:
            self._look()
        except Exception as error:
            logger.exception("routing failed")
            self._fail_all(f"the router failed: {type(error).__name__}: {error}")

    def _look(self) -> None:
        """Go through the queue once."""
        refusing: set[Member] = set()
        while (entry := self._queue.head()) is not None:
            if not self.healthy:
                self._fail_all("every engine has failed")
                break
            try:
                member = choose(
                    entry, self._members, self._beginnings, refusing=refusing, preempts=self._queue.preempts
                )
                if member is not None and not self._give(entry, member):
                    refusing.add(member)
            except RequestError as error:
                self._fail(entry, str(error))
                continue
            except Exception as error:
                logger.exception("%s can't be handed to an engine", entry.request.request_id)
                self._fail(entry, f"the router failed: {type(error).__name__}: {error}", engine_failed=True)
                continue
            if member is None and not self._queue.pass_by(entry):
                break
        self._queue.restore()

    def _give(self, entry: Entry, member: Member) -> bool:
        """Hand a request over; False if the engine doesn't take it now.

        Raises:
            RequestError: it never takes it.
        """
        self._queue.take(entry)
        member.given(entry)
        for stream in entry.streams:
            stream.at_end = functools.partial(self._at_end, entry, stream)
            self._at[stream] = member
        try:
            member.engine.submit_into(dataclasses.replace(entry.request, request_id=entry.key), entry.streams)
        except (EngineStoppedError, QueueFullError):
            member.taken_back(entry)
            self._queue.put_back(entry)
            self._wait(entry)
            return False
        except BaseException:
            member.taken_back(entry)
            raise
        self._beginnings.sent(entry.blocks, self._members.index(member))
        return True

    def _at_end(self, entry: Entry, stream: OutputStream, update: TextUpdate) -> bool:
        """On an engine's text thread: an answer has ended there. True: it goes on elsewhere."""
        with self._changed:
            member = self._at[stream]
            member.ended(entry)
            stream.at_end = None
            again = update.engine_failed and not stream.num_delivered and not entry.was_retried
            again = again and self.healthy and not self._stopping
            if again:
                member.num_moved += 1
                self._wait(self._queue.part(entry, stream, is_retry=True))
            else:
                self._forget(stream)
                if update.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                    self._queue.learn(entry, stream.num_delivered)
            self._changed.notify_all()
        return again

    def _forget(self, stream: OutputStream) -> None:
        streams = self._open[stream.request.request_id]
        streams.discard(stream)
        if not streams:
            del self._open[stream.request.request_id]

    def _end_unserved(
        self, stream: OutputStream, reason: FinishReason, error: str | None = None, *, engine_failed: bool = False
    ) -> None:
        """End an answer that no engine has."""
        self._finished[reason.value] += 1
        self._forget(stream)
        stream.at_end = None
        stream.given_to(nobody)
        deliver([(stream, TextUpdate.ending(reason, time.monotonic(), error, engine_failed=engine_failed))])
        self._changed.notify_all()

    def _fail(self, entry: Entry, error: str, *, engine_failed: bool = False) -> None:
        """End a request that no engine has, or that none takes."""
        if entry in self._queue:
            self._queue.drop(entry)
        for stream in entry.streams:
            self._end_unserved(stream, FinishReason.ERROR, error, engine_failed=engine_failed)

    def _fail_all(self, error: str) -> None:
        for entry in self._queue.entries:
            self._fail(entry, error, engine_failed=True)

    # ------------------------------------------------------------------ what they are doing

    def stats_by_engine(self) -> dict[str, EngineStats]:
        return {
            name: stats
            for index, member in enumerate(self._members)
            for name, stats in member.stats_by_engine(str(index)).items()
        }

    def stats(self) -> EngineStats:
        """Of all engines and of the queue before them."""
        total = super().stats()
        with self._changed:
            finished = {reason: count + self._finished[reason] for reason, count in total.finished.items()}
            num_waiting = total.num_waiting + self._queue.num_answers
        return dataclasses.replace(total, num_waiting=num_waiting, finished=finished)

    @property
    def healthy(self) -> bool:
        return any(engine.healthy for engine in self.engines)

    @property
    def accepting(self) -> bool:
        return self._accepting and any(engine.accepting for engine in self.engines)

    @property
    def paused(self) -> bool:
        return self._paused

    # ------------------------------------------------------------------ control

    def pause(self) -> None:
        with self._changed:
            self._paused = True
        for engine in self.engines:
            engine.pause()

    def resume(self) -> None:
        for engine in self.engines:
            engine.resume()
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def sleep(self) -> None:
        self.pause()
        self._on_all(lambda engine: engine.sleep())

    def wake(self) -> None:
        self._on_all(lambda engine: engine.wake())
        self.resume()

    def update_params(self, params: Any, *, running: Literal["keep", "restart"] = "restart") -> None:
        """As :meth:`ServingEngine.update_params`, on one engine after the other: for a moment they differ."""
        self._on_all(lambda engine: engine.update_params(params, running=running))
        self._forget_beginnings()

    def reset_prefix_cache(self) -> None:
        self._on_all(lambda engine: engine.reset_prefix_cache())
        self._forget_beginnings()

    def _forget_beginnings(self) -> None:
        with self._changed:
            self._beginnings.forget()

    def _on_all(self, call: Callable[[Engine], None]) -> None:
        """On every engine that runs, with what works for it. One that has stopped, or stops meanwhile, keeps the others
        from nothing.

        Raises:
            EngineStoppedError: none runs.
        """
        num_done = 0
        for engine in self.engines:
            if any(stats.healthy for stats in engine.stats_by_engine().values()):
                try:
                    call(engine)
                    num_done += 1
                except EngineStoppedError as error:
                    logger.debug("an engine has stopped: %s", error)
        if not num_done:
            raise EngineStoppedError("no engine is running")

    def shutdown(self, *, drain_s: float = 0.0) -> None:
        deadline_s = time.monotonic() + drain_s
        with self._changed:
            self._accepting = False
        if self._paused and drain_s:
            self.resume()
        with self._changed:
            self._changed.wait_for(lambda: not self._open, timeout=drain_s)
            self._stopping = True
            for entry in self._queue.entries:
                self._queue.drop(entry)
                for stream in entry.streams:
                    self._end_unserved(stream, FinishReason.ABORT)
            self._changed.notify_all()
        self._thread.join()
        left_s = max(0.0, deadline_s - time.monotonic())
        threads = [
            threading.Thread(target=engine.shutdown, kwargs={"drain_s": left_s}, name=f"jaxcb-drain-{i}")
            for i, engine in enumerate(self.engines)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _of_all(config: EngineConfig, asked_for: EngineConfig) -> EngineConfig:
    """What one engine resolved, with what is of all of them."""
    names = ("data_parallel_size", "max_waiting", "event_log", "step_log", "trace")
    return dataclasses.replace(config, **{name: getattr(asked_for, name) for name in names})
