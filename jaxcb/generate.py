"""The offline API: ``generate(prompts)``, ``stream(prompt)``, ``beam_search(prompts)``, over the server's engine.

``python -m jaxcb.generate --input in.jsonl --output out.jsonl`` is :mod:`jaxcb.batch`.

from jaxcb.generate import generate
from jaxcb.request import SamplingParams

for output in generate(["The capital of France is"], SamplingParams(max_tokens=8, temperature=0)):
    print(output.text)
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import functools
import itertools
import logging
import numbers
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxcb import cluster, validation
from jaxcb.beam import BeamParams
from jaxcb.config import EngineConfig
from jaxcb.engine import OutputStream, ServingEngine, beams
from jaxcb.engine.beams import check_beams
from jaxcb.errors import ConfigError, EngineStoppedError, QueueFullError, RequestError
from jaxcb.gather import RETRY_S, gather, when_accepted
from jaxcb.request import FinishReason, Request, RequestOutput, SamplingParams, best_choices

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, token ids, or chat messages (dicts with "role" and "content", through the model's chat template)."""

_OPEN_AT_ONCE = 1024
"""Prompts that the engine has at a time, enough to keep every slot filled; the rest isn't even tokenized yet."""
_ids = itertools.count()
_shared: ServingEngine | None = None
_starting = threading.Lock()
"""Calls of several threads and coroutines start one engine."""

logger = logging.getLogger(__name__)


def generate(
    prompts: Prompt | Sequence[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    config: EngineConfig | None = None,
    engine: ServingEngine | None = None,
    progress: bool = True,
) -> list[RequestOutput]:
    """Continue every prompt; results in the order of the prompts. Where ``n`` is above 1 a result is the first answer,
    and its ``choices`` are all of them.

    A prompt that is impossible (too long, say), or fails on the way, loses nothing for the others: its result has the
    finish reason ``error``, and ``error`` says why. Only where no prompt is possible the first one's error is raised.
    Ctrl-C ends what still runs and returns what there is: results that are not whole have the finish reason ``abort``.

    Arguments:
        prompts: one prompt or many, of any kind each. Tens of thousands are fine: the engine is given a window of them.
        sampling: one for all prompts, or one for each. Default: ``SamplingParams()``, changed where the model's
            ``generation_config.json`` says so (:class:`EngineConfig`); one that is given holds as it is.
        config: of the engine to start; it stays up for later calls with an equal config. Default: ``EngineConfig()``,
            which is the built-in model.
        engine: use this running engine instead; excludes ``config``.
        progress: show progress bars on stderr, with the tokens a second that were generated.

    Raises:
        RequestError: ``prompts`` or ``sampling`` are of another type, or no prompt is possible.
        EngineStoppedError: the engine failed while it worked.
    """
    many = _as_list(prompts)
    wanted = _one_for_each(sampling, len(many))
    engine = _engine(config, engine, progress)
    window = _Window(engine, many, wanted)
    try:
        with _Bar(len(many), progress) as bar:
            for output in window.run():
                bar.finished(output)
    except KeyboardInterrupt:
        logger.warning("interrupted: %d of %d prompts are answered", window.num_answered, len(many))
    finally:
        window.close()
    return _results(window.results(), window.refusals)


async def generate_async(
    prompts: Prompt | Sequence[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    config: EngineConfig | None = None,
    engine: ServingEngine | None = None,
    progress: bool = True,
) -> list[RequestOutput]:
    """:func:`generate` for a coroutine; cancelling it ends what still runs."""
    many = _as_list(prompts)
    wanted = _one_for_each(sampling, len(many))
    running = await asyncio.to_thread(_engine, config, engine, progress)
    refusals: list[RequestError] = []

    async def one(index: int) -> RequestOutput:
        params = wanted[index] or SamplingParams(**running.sampling_defaults)
        try:
            request = await asyncio.to_thread(_ready_request, running, many[index], params, f"prompts[{index}]")
            _check_queue(running, request)
            streams = await when_accepted(lambda: running.submit_choices(request))
        except RequestError as error:
            refusals.append(error)
            output = _refused(error)
        else:
            try:
                output = _answer([await _last_async(running, stream) for stream in streams], params)
            finally:
                for stream in streams:
                    stream.abort()
        bar.finished(output)
        return output

    with _Bar(len(many), progress) as bar:
        outputs = await gather(range(len(many)), one, at_once=_OPEN_AT_ONCE)
    return _results(outputs, refusals)


def _check_queue(engine: ServingEngine, request: Request) -> None:
    """Raise RequestError if the engine's queue could never take all answers."""
    count, limit = request.sampling.num_choices, engine.config.max_waiting
    if limit is not None and count > limit:
        raise RequestError(
            f"{count} answers are asked for, and the engine's queue takes {limit} (max_waiting)", param="n"
        )


class _Window:
    """The prompts of a call: waiting, in the engine, answered."""

    def __init__(self, engine: ServingEngine, prompts: Sequence[Prompt], sampling: Sequence[SamplingParams | None]):
        self._engine, self._prompts, self._sampling = engine, prompts, sampling
        self._open: dict[int, tuple[list[OutputStream], SamplingParams]] = {}
        self._answers: dict[int, RequestOutput] = {}
        self.refusals: list[RequestError] = []
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._next = 0

    @property
    def num_answered(self) -> int:
        return len(self._answers)

    def run(self) -> Iterator[RequestOutput]:
        """Answers as they come."""
        while len(self._answers) < len(self._prompts):
            while self._next < len(self._prompts) and len(self._open) < _OPEN_AT_ONCE:
                try:
                    refused = self._submit(self._next)
                except QueueFullError:
                    time.sleep(0.0 if self._open else RETRY_S)
                    break
                if refused is not None:
                    self._answers[self._next] = refused
                    yield refused
                self._next += 1
            if not self._open:
                continue
            index = self._ended.get()
            streams, sampling = self._open[index]
            self._answers[index] = _answer([_last(self._engine, stream) for stream in streams], sampling)
            del self._open[index]
            yield self._answers[index]

    def _submit(self, index: int) -> RequestOutput | None:
        """Hand a prompt to the engine; its result if it is refused."""
        try:
            params = self._sampling[index] or SamplingParams(**self._engine.sampling_defaults)
            request = _request(self._engine, self._prompts[index], params, f"prompts[{index}]")
            _check_queue(self._engine, request)
            streams = self._engine.submit_choices(request, blocking=True)
        except RequestError as error:
            self.refusals.append(error)
            return _refused(error)
        self._open[index] = streams, params
        still_open = itertools.count(len(streams) - 1, -1)

        def ended() -> None:
            if next(still_open) == 0:
                self._ended.put(index)

        for stream in streams:
            stream.when_ended(ended)
        return None

    def close(self) -> None:
        """End what still runs."""
        for streams, _ in self._open.values():
            for stream in streams:
                stream.abort()

    def results(self) -> list[RequestOutput]:
        """In the order of the prompts; after an interrupt with the beginnings of those that were under way."""
        for index, (streams, sampling) in self._open.items():
            if self._engine.healthy:
                self._answers[index] = _answer([_last(self._engine, stream) for stream in streams], sampling)
        return [self._answers.get(index, _NOT_BEGUN) for index in range(len(self._prompts))]


class _Bar:
    """Prompts that are answered, and generated tokens a second."""

    def __init__(self, total: int, progress: bool):
        self._bar = tqdm(total=total, desc="generating", unit="prompt", disable=not progress)
        self._num_tokens, self._started_s = 0, time.monotonic()

    def finished(self, output: RequestOutput) -> None:
        self._num_tokens += sum(len(choice.token_ids) for choice in output.choices or (output,))
        elapsed_s = max(time.monotonic() - self._started_s, 1e-6)
        self._bar.set_postfix_str(f"{self._num_tokens / elapsed_s:,.0f} tok/s", refresh=False)
        self._bar.update()

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.close()


def _refused(error: RequestError) -> RequestOutput:
    """In the place of an answer."""
    return RequestOutput(
        request_id=f"generate-{next(_ids)}",
        prompt_token_ids=(),
        token_ids=(),
        text="",
        finish_reason=FinishReason.ERROR,
        error=str(error),
    )


_NOT_BEGUN = RequestOutput(
    request_id="generate", prompt_token_ids=(), token_ids=(), text="", finish_reason=FinishReason.ABORT
)
"""In the place of an answer that an interrupt came before."""


def _results(outputs: list[RequestOutput], refusals: Sequence[RequestError]) -> list[RequestOutput]:
    """The outputs, unless every prompt was refused."""
    if refusals and len(refusals) == len(outputs):
        raise refusals[0]
    if refusals:
        logger.warning("%d of %d prompts were refused; the first: %s", len(refusals), len(outputs), refusals[0])
    return outputs


def beam_search(
    prompts: Prompt | Sequence[Prompt],
    params: BeamParams | None = None,
    *,
    config: EngineConfig | None = None,
    engine: ServingEngine | None = None,
    progress: bool = True,
) -> list[RequestOutput]:
    """The likeliest answers to every prompt, by beam search; results in the order of the prompts. A result is the best
    answer, and its ``choices`` are all ``width`` of them, the best first, each with its ``score``.

    Arguments, but for ``params``, and errors as for :func:`generate`.
    """
    many, params = _as_list(prompts), params or BeamParams()
    engine = _engine(config, engine, progress)
    requests = [
        Request(
            request_id=f"generate-{next(_ids)}",
            prompt_token_ids=_token_ids(engine, prompt, f"prompts[{i}]"),
            arrival_s=time.monotonic(),
        )
        for i, prompt in enumerate(many)
    ]
    for i, request in enumerate(requests):
        _named(f"prompts[{i}]", functools.partial(check_beams, engine, request, params))
    results = []
    for request in tqdm(requests, desc="searching", unit="prompt", disable=not progress):
        searching = beams.search(engine, request, params, blocking=True)
        with contextlib.closing(searching):
            answers = _finished(searching)
        results.append(dataclasses.replace(answers[0], choices=tuple(answers)))
    return results


def _finished(searching: beams.Searching) -> list[RequestOutput]:
    """Bring a search what it waits for until it has its result."""
    streams = next(searching)
    while True:
        outputs = [_checked(next(stream)) for stream in streams]
        try:
            streams = searching.send(outputs)
        except StopIteration as end:
            return end.value


def stream(
    prompt: Prompt,
    sampling: SamplingParams | None = None,
    *,
    config: EngineConfig | None = None,
    engine: ServingEngine | None = None,
    progress: bool = True,
) -> Iterator[RequestOutput]:
    """Continue one prompt, yielding an output for each token; ``new_text`` is what it added.

    Leaving the loop early drops the request. Arguments and errors as for :func:`generate`.
    """
    [params] = _one_for_each(sampling, 1)
    engine = _engine(config, engine, progress)
    params = params or SamplingParams(**engine.sampling_defaults)
    with engine.submit_blocking(_request(engine, prompt, params, "prompt")) as outputs:
        for output in outputs:
            yield _checked(output)


async def stream_async(
    prompt: Prompt,
    sampling: SamplingParams | None = None,
    *,
    config: EngineConfig | None = None,
    engine: ServingEngine | None = None,
    progress: bool = True,
) -> AsyncIterator[RequestOutput]:
    """:func:`stream` for a coroutine."""
    [params] = _one_for_each(sampling, 1)
    running = await asyncio.to_thread(_engine, config, engine, progress)
    params = params or SamplingParams(**running.sampling_defaults)
    request = await asyncio.to_thread(_ready_request, running, prompt, params, "prompt")
    async with running.submit(request) as outputs:
        async for output in outputs:
            yield _checked(output)


def _engine(config: EngineConfig | None, engine: ServingEngine | None, progress: bool) -> ServingEngine:
    global _shared
    if engine is not None:
        if config is not None:
            raise ConfigError("give either config or engine: the engine has its config already", param="config")
        return engine
    config = EngineConfig() if config is None else config
    if not isinstance(config, EngineConfig):
        raise ConfigError(f"config must be an EngineConfig, got {validation.shown(config)}", param="config")
    with _starting:
        if _shared is not None and (_shared.asked_for != config or not _shared.healthy):
            _shut_down_shared()
        if _shared is None:
            _shared = cluster.start(config, progress=progress)
        return _shared


@atexit.register
def _shut_down_shared() -> None:
    """One exit handler for whichever engine is up: a handler for each would keep old engines and their memory."""
    global _shared
    if _shared is not None:
        _shared.shutdown()
        _shared = None


def _request(engine: ServingEngine, prompt: Prompt, sampling: SamplingParams, where: str) -> Request:
    """Tokenize and validate, so that a bad prompt is known before anything starts."""
    request = Request(
        request_id=f"generate-{next(_ids)}",
        prompt_token_ids=_token_ids(engine, prompt, where),
        sampling=sampling,
        arrival_s=time.monotonic(),
    )
    _named(where, functools.partial(engine.check_request, request))
    return request


def _ready_request(engine: ServingEngine, prompt: Prompt, sampling: SamplingParams, where: str) -> Request:
    """As :func:`_request`, with all done that takes its time: an asyncio loop can submit it and go on."""
    request = _request(engine, prompt, sampling, where)
    if sampling.structured_outputs is not None:
        engine.compile_grammar(sampling.structured_outputs)
    return request


def _named(where: str, check: Callable[[], None]) -> None:
    """Check a prompt; an error says which it was."""
    try:
        check()
    except RequestError as error:
        raise RequestError(f"{where}: {error}", param=error.param) from None


def _token_ids(engine: ServingEngine, prompt: Prompt, where: str) -> list[int]:
    limit = engine.config.max_model_len
    if isinstance(prompt, str):
        return engine.tokenizer.encode(prompt, max_tokens=limit)
    if isinstance(prompt, Sequence) and prompt and all(isinstance(item, Mapping) for item in prompt):
        messages: list[Mapping[str, Any]] = list(prompt)  # type: ignore[arg-type]  # checked item by item
        return engine.tokenizer.apply_chat_template(messages, max_tokens=limit)
    if _is_ids(prompt):
        return validation.token_ids(where, prompt)
    raise RequestError(
        f"{where} must be a string, a list of token ids or a list of chat messages, got {validation.shown(prompt)}",
        param="prompts",
    )


def _is_ids(prompt: object) -> bool:
    """Whether this can only be one prompt's token ids: a one-dimensional array, or a sequence that begins with one."""
    if hasattr(prompt, "ndim"):
        return prompt.ndim == 1
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str | bytes | bytearray)
        and (not prompt or isinstance(prompt[0], numbers.Integral))
    )


def _as_list(prompts: Any) -> list[Prompt]:
    """A single prompt becomes a list of one. A two-dimensional array holds a prompt a row."""
    if isinstance(prompts, str):
        return [prompts]
    if hasattr(prompts, "__array__"):
        prompts = np.asarray(prompts)  # a jax array too
        return list(prompts) if prompts.ndim == 2 else [prompts]
    if isinstance(prompts, bytes | bytearray | Mapping) or not isinstance(prompts, Sequence):
        raise RequestError(
            f"prompts must be a prompt or a list of prompts, got {validation.shown(prompts)}", param="prompts"
        )
    if len(prompts) and (_is_ids(prompts) or isinstance(prompts[0], Mapping)):
        return [prompts]
    return list(prompts)


def _one_for_each(
    sampling: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams | None]:
    """None stands for the engine's defaults."""
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling] * count
    if not isinstance(sampling, Sequence) or not all(isinstance(params, SamplingParams) for params in sampling):
        raise RequestError(
            f"sampling must be a SamplingParams or a list of them, got {validation.shown(sampling)}", param="sampling"
        )
    if len(sampling) != count:
        raise RequestError(f"there are {count} prompts and {len(sampling)} sampling parameters", param="sampling")
    return list(sampling)


def _answer(choices: list[RequestOutput], sampling: SamplingParams) -> RequestOutput:
    """The first answer, which knows the others."""
    chosen = best_choices(choices, sampling)
    return dataclasses.replace(chosen[0], choices=tuple(chosen))


def _last(engine: ServingEngine, outputs: OutputStream) -> RequestOutput:
    """The result; an error that is the request's own is one."""
    for output in outputs:
        if output.finished:
            return _checked(output) if output.engine_failed else output
    raise EngineStoppedError("the stream ended without a result")


async def _last_async(engine: ServingEngine, outputs: OutputStream) -> RequestOutput:
    async for output in outputs:
        if output.finished:
            return _checked(output) if output.engine_failed else output
    raise EngineStoppedError("the stream ended without a result")


def _checked(output: RequestOutput) -> RequestOutput:
    if output.error is not None:
        raise EngineStoppedError(output.error)
    return output


if __name__ == "__main__":
    from jaxcb.batch import main

    raise SystemExit(main())
