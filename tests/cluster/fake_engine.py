"""An engine without a model, for routing: what it is given runs until the test says how it goes on."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from jaxcb.config import EngineConfig
from jaxcb.engine import EngineStats, OutputStream
from jaxcb.engine.stream import deliver
from jaxcb.errors import EngineStoppedError, RequestError
from jaxcb.request import FinishReason, Request
from jaxcb.scheduler import SchedulerLimits
from jaxcb.text.worker import TextUpdate


class FakeEngine:
    name = "fake"

    def __init__(self, *, max_num_seqs: int = 64, pages: int = 10_000, admits: bool = True, **knobs: Any):
        self.limits = SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(max_num_seqs, 64),
            max_model_len=100_000,
            num_kv_pages=pages,
            page_size=16,
            num_slots=max_num_seqs,
            **knobs,
        )
        self.config = self.asked_for = EngineConfig(max_num_seqs=max_num_seqs, max_waiting=5)
        self.spec, self.tokenizer, self.sampling_defaults = SimpleNamespace(vocab_size=300), None, {}
        self.max_choices = max_num_seqs
        self.healthy = self.accepting = True
        self.paused = False
        self.admits = admits
        self.stalled_s = 0.0
        self.running: dict[str, list[OutputStream]] = {}
        """By the id that the engine was given."""
        self.taken: list[str] = []
        """The clients' ids."""
        self.did: list[Any] = []
        self.finished: Counter[str] = Counter()

    def check_request(self, request: Request) -> None:
        if list(request.prompt_token_ids) == [13]:
            raise RequestError("unlucky", param="prompt")

    def submit_into(self, request: Request, streams: Sequence[OutputStream]) -> None:
        if not self.healthy:
            raise EngineStoppedError("stopped")
        if list(request.prompt_token_ids) in ([14], [15]):
            raise RequestError("not here", param="prompt") if request.prompt_token_ids[0] == 14 else OSError("broken")
        self.taken.append(streams[0].request.request_id)
        self.running[request.request_id] = list(streams)
        for stream in streams:
            stream.given_to(lambda stream=stream: self.end(stream, FinishReason.ABORT))

    def abort(self, request_id: str) -> None:
        self.did.append(("abort", request_id))

    def stream_of(self, request_id: str, index: int = 0) -> OutputStream:
        """Of the client's request of this name."""
        found = [s for streams in self.running.values() for s in streams if s.request.request_id == request_id]
        return next(stream for stream in found if stream.index == index)

    def token(self, stream: OutputStream, token: int = 1) -> None:
        deliver([(stream, dataclasses.replace(update(None), token_ids=[token]))])

    def end(self, stream: OutputStream, reason: FinishReason = FinishReason.STOP, **more: Any) -> None:
        for key, streams in list(self.running.items()):
            if stream in streams:
                streams.remove(stream)
                if not streams:
                    del self.running[key]
        self.finished[reason.value] += 1
        deliver([(stream, dataclasses.replace(update(reason), **more))])

    def fail(self) -> None:
        self.healthy = self.accepting = False
        for stream in [stream for streams in self.running.values() for stream in streams]:
            self.end(stream, FinishReason.ERROR, error="the engine failed", engine_failed=True)

    @property
    def num_running(self) -> int:
        return sum(map(len, self.running.values()))

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=self.num_running if self.admits else 0,
            num_waiting=0 if self.admits else self.num_running,
            kv_pages_total=self.limits.num_kv_pages,
            kv_pages_used=0,
            kv_pages_cached=0,
            prompt_tokens=0,
            prompt_tokens_cached=0,
            generation_tokens=0,
            preemptions=0,
            steps=0,
            finished={reason.value: self.finished[reason.value] for reason in FinishReason},
            uptime_s=1.0,
            stalled_s=self.stalled_s,
            healthy=self.healthy,
        )

    def stats_by_engine(self) -> dict[str, EngineStats]:
        return {"0": self.stats()}

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def sleep(self) -> None:
        self.did.append("sleep")

    def wake(self) -> None:
        self.did.append("wake")

    def update_params(self, params: Any, *, running: str = "restart") -> None:
        self.did.append(("update", params, running))

    def reset_prefix_cache(self) -> None:
        self.did.append("reset")

    def shutdown(self, *, drain_s: float = 0.0) -> None:
        self.healthy = self.accepting = False


def update(reason: FinishReason | None) -> TextUpdate:
    return dataclasses.replace(TextUpdate.ending(FinishReason.STOP, 0.0), finish_reason=reason)
