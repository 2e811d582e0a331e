"""A deterministic engine without a model: characters are tokens, and the answer says the prompt again and again.

Run as a script it is ``python -m jaxcb.serve`` around that engine (arguments are passed on).
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from jaxcb.config import EngineConfig
from jaxcb.errors import EngineStoppedError, ModelError, QueueFullError, RequestError
from jaxcb.logits_processor import check_extra_args
from jaxcb.logprobs import Logprobs
from jaxcb.request import FinishReason, Request, RequestOutput
from jaxcb.structured_outputs import StructuredOutputs

EOS = ord("!")
FAILS = "?"
"""A prompt that begins so makes the engine fail after two tokens."""
IMPOSSIBLE = "~"
"""One that begins so fails by itself after two tokens; the engine goes on."""
MAX_MODEL_LEN = 128
PAGES = 64


class FakeTokenizer:
    """One id a character. Chat prompts are "role:content" lines, behind a line of the tools if there are any."""

    has_chat_template = True

    def __init__(self) -> None:
        self.chat_template = "fake"
        self.variables = {"messages", "tools"}
        self.special: set[str] = set()

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        return [ord(char) for char in text]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        if self.chat_template == "raise":
            raise RequestError("the template refused", param="messages")
        lines = [f"tools:{','.join(tool['function']['name'] for tool in tools)}\n"] if tools else []
        lines += [f"{name}={value}\n" for name, value in (template_kwargs or {}).items()]
        for message in messages:
            content = message["content"]
            text = content if isinstance(content, str) else "\n".join(part["text"] for part in content or ())
            calls = "".join(
                f"<{call['function']['name']}{call['function']['arguments']}>" for call in message.get("tool_calls", ())
            )
            lines.append(f"{message['role']}:{text}{calls}\n")
        text = "".join(lines)
        return text.removesuffix("\n") if continue_final_message else text

    def encode_chat(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        return self.encode(text)

    def reads(self, name: str) -> bool:
        return name in self.variables

    def is_special(self, text: str) -> bool:
        return text in self.special

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()

    def warm_up(self) -> None: ...


class FakeStream:
    """Yields one token every ``engine.step_s``; belongs to the loop it was made in."""

    def __init__(self, engine: FakeEngine, request: Request, index: int):
        self._engine, self.request, self._index = engine, request, index
        self._loop = asyncio.get_running_loop()
        self._ready: deque[RequestOutput] = deque()
        self._ids: list[int] = []
        self._text = ""
        self._wake = asyncio.Event()
        self._first_s: float | None = None
        self.ended: FinishReason | None = None

    def abort(self) -> None:
        self._end(FinishReason.ABORT)

    def stop_from_thread(self) -> None:
        self._loop.call_soon_threadsafe(self.abort)

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.ended is not None and not self._wake.is_set():
            raise StopAsyncIteration
        if self.ended is None:
            try:
                await asyncio.wait_for(self._wake.wait(), self._engine.step_s)
            except TimeoutError:
                return self._next_token()
        self._wake.clear()
        return self._output([], "", self.ended)

    def _next_token(self) -> RequestOutput:
        sampling, prompt = self.request.sampling, self.request.prompt_token_ids
        if self._engine.fails or (len(self._ids) == 2 and chr(prompt[0]) == FAILS):
            self._engine.healthy = False
            self._engine._ended(self, FinishReason.ERROR)
            return self._output([], "", self.ended, error="/secret/path: XlaRuntimeError", engine_failed=True)
        if len(self._ids) == 2 and chr(prompt[0]) == IMPOSSIBLE:
            self._engine._ended(self, FinishReason.ERROR)
            return self._output([], "", self.ended, error="no token could be sampled")
        script = self._engine.answer
        if script is None:
            token = prompt[len(self._ids) % len(prompt)]
        else:
            token = ord(script[len(self._ids)]) if len(self._ids) < len(script) else EOS
        self._ids.append(token)
        self._first_s = self._first_s or time.monotonic()
        self._engine.counts["generation"] += 1
        limit = min(sampling.max_tokens or self._engine.limit, self._engine.limit - len(prompt))
        reason: FinishReason | None = None
        piece = chr(token)
        if token == EOS and not sampling.ignore_eos and (script is None or len(self._ids) > len(script)):
            reason, piece = FinishReason.STOP, ""
        elif len(self._ids) >= limit:
            reason = FinishReason.LENGTH
        self._text += piece
        stop = next((text for text in sampling.stop if self._text.endswith(text)), None)
        if stop is not None:
            reason, piece = FinishReason.STOP, ""  # stop strings of one character are exact, which is enough here
            self._text = self._text.removesuffix(stop)
        if reason is not None:
            self._engine._ended(self, reason)
        return self._output([token], piece, reason, stop_reason=stop)

    def _output(self, ids: list[int], piece: str, reason: FinishReason | None, **more: Any) -> RequestOutput:
        return RequestOutput(
            request_id=self.request.request_id,
            prompt_token_ids=self.request.prompt_token_ids,
            token_ids=self._ids,
            text=self._text,
            new_token_ids=ids,
            new_text=piece,
            finish_reason=reason,
            num_cached_tokens=1,
            arrival_s=self.request.arrival_s,
            first_token_s=self._first_s,
            finished_s=None if reason is None else time.monotonic(),
            index=self._index,
            logprobs_parts=None if self._asked is None else self._logprobs(self._ids),
            new_logprobs_parts=None if self._asked is None else self._logprobs(ids),
            prompt_logprobs=self._prompt_logprobs(),
            embedding=self._embedding(),
            **more,
        )

    @property
    def _asked(self) -> int | None:
        return 0 if self.request.sampling.best_of else self.request.sampling.logprobs

    def _prompt_logprobs(self) -> Logprobs | None:
        asked = self.request.sampling.prompt_logprobs
        return None if asked is None else self._logprobs(list(self.request.prompt_token_ids[1:]), asked)[0]

    def _embedding(self) -> np.ndarray | None:
        """The last token and twice that, or the mean of all, and the number of tokens."""
        ids, pooling = np.asarray(self.request.prompt_token_ids, np.float32), self.request.pooling
        if pooling is None:
            return None
        value = ids[-1] if pooling == "last" else ids.mean()
        return np.asarray([value, 2 * value, len(ids)], np.float32)

    def _logprobs(self, ids: list[int], asked: int | None = None) -> list[Logprobs]:
        """Each token has -1, and -2 in a choice of odd index; the next character is never drawn: -inf."""
        asked = self._asked if asked is None else asked
        own = np.asarray(ids, np.int32)
        values = np.full(len(ids), -1.0 - self._index % 2, np.float32)
        top = np.stack([own, own + 1], 1)[:, :asked]
        top_values = np.stack([values, np.full_like(values, -np.inf)], 1)[:, :asked]
        return [Logprobs(own, values, np.ones_like(own), top, top_values)]

    def _end(self, reason: FinishReason) -> None:
        if self.ended is None:
            self._engine._ended(self, reason)
            self._wake.set()


class FakeEngine:
    """The engine's interface; ``step_s``: seconds a token; ``num_waiting``: others that stay in the queue; ``answer``:
    what it says to every prompt, instead of the prompt."""

    def __init__(
        self,
        *,
        step_s: float = 0.0,
        max_waiting: int | None = None,
        num_waiting: int = 0,
        enable_prefix_caching: bool = True,
        policy: str = "fcfs",
        sampling_defaults: dict[str, Any] | None = None,
        answer: str | None = None,
        max_model_len: int = MAX_MODEL_LEN,
    ):
        self.answer = answer
        self.name = "fake-model"
        self.spec = SimpleNamespace(family="fake", num_params=1_500_000_000, vocab_size=0x110000, hidden_size=3)
        self.tokenizer = FakeTokenizer()
        self.config = EngineConfig(
            dtype="float32",
            max_model_len=max_model_len,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            decode_buckets=(1, 4),
            mixed_buckets=(),
            num_kv_pages=PAGES,
            max_waiting=max_waiting,
            enable_prefix_caching=enable_prefix_caching,
            policy=policy,
            backend="xla",
        )
        self.sampling_defaults = sampling_defaults or {}
        self.healthy = True
        self.paused = False
        self.accepting = True
        self.stalled_s = 0.0
        self.num_resets = 0
        self.peers: dict[str, bool] = {}
        self.fails = False
        self.step_s = step_s
        self.num_waiting = num_waiting
        self.host_memory = {"host_pages_total": 0}
        self.requests: list[Request] = []
        self.live: list[FakeStream] = []
        self.counts: Counter[str] = Counter()
        self.finished: Counter[str] = Counter({str(reason): 0 for reason in FinishReason})
        self._stopped = False

    @property
    def limit(self) -> int:
        assert self.config.max_model_len is not None
        return self.config.max_model_len

    @classmethod
    def start(cls, config: EngineConfig, *, progress: bool = True) -> FakeEngine:
        if config.model == "missing":
            raise ModelError("model 'missing' is not a directory")
        engine = cls(step_s=0.02, max_waiting=config.max_waiting)
        print("fake engine:", dataclasses.asdict(config), file=sys.stderr)
        return engine

    def compile_grammar(self, structured: StructuredOutputs) -> None:
        assert threading.current_thread() is not threading.main_thread(), "it may take long: not on the event loop"
        if "uniqueItems" in str(structured.json):
            raise RequestError("uniqueItems is not supported", param="structured_outputs.json")

    def submit_choices(self, request: Request) -> list[FakeStream]:
        return [self._submit(request, index) for index in range(request.sampling.num_choices)]

    def _submit(self, request: Request, index: int) -> FakeStream:
        if self._stopped or not self.healthy:
            raise EngineStoppedError("the engine was shut down by /secret/path")
        check_extra_args((), request.sampling.extra_args)
        if len(request.prompt_token_ids) >= self.limit:
            raise RequestError(f"at most {self.limit} tokens fit", param="prompt")
        if len(request.prompt_token_ids) + (request.sampling.max_tokens or 0) > self.limit:
            raise RequestError(f"max_tokens: at most {self.limit} tokens fit", param="max_tokens")
        if self.config.max_waiting is not None and self.num_waiting + len(self.live) >= self.config.max_waiting:
            raise QueueFullError(f"the queue holds {self.config.max_waiting} requests already")
        stream = FakeStream(self, request, index)
        self.requests.append(request)
        self.live.append(stream)
        self.counts["prompt"] += len(request.prompt_token_ids)
        self.counts["cached"] += 1
        return stream

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def reset_prefix_cache(self) -> None:
        self.num_resets += 1

    def stats_by_engine(self) -> dict[str, SimpleNamespace]:
        return {"0": self.stats()}

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(
            healthy=self.healthy,
            state="ok" if self.healthy and self.stalled_s < 60 else "stalled" if self.healthy else "stopped",
            num_running=len(self.live),
            num_waiting=self.num_waiting,
            kv_pages_total=PAGES,
            kv_pages_used=len(self.live),
            kv_pages_cached=3,
            prompt_tokens=self.counts["prompt"],
            prompt_tokens_cached=self.counts["cached"],
            generation_tokens=self.counts["generation"],
            preemptions=0,
            compiles=0,
            **self.host_memory,
            steps=0,
            finished=dict(self.finished),
            uptime_s=0.0,
            stalled_s=self.stalled_s,
            answers=True,
        )

    def shutdown(self, *, drain_s: float = 0.0) -> None:
        self._stopped = True
        deadline = time.monotonic() + drain_s
        while self.live and time.monotonic() < deadline:
            time.sleep(0.01)
        for stream in tuple(self.live):
            stream.stop_from_thread()

    def _ended(self, stream: FakeStream, reason: FinishReason) -> None:
        stream.ended = reason
        self.live.remove(stream)
        self.finished[str(reason)] += 1


if __name__ == "__main__":
    assert threading.current_thread() is threading.main_thread()
    module = ModuleType("jaxcb.cluster")
    module.start = FakeEngine.start  # type: ignore[attr-defined]  # stands in for the real one
    sys.modules["jaxcb.cluster"] = module
    from jaxcb.serve.__main__ import main

    sys.exit(main())
