"""Embeddings of texts and log-likelihoods of continuations, as requests of an engine like any other.

Each computes its prompt and one token that nobody reads.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from jaxcb import validation
from jaxcb.engine.stream import OutputStream
from jaxcb.errors import EngineStoppedError, QueueFullError, RequestError
from jaxcb.gather import RETRY_S, gather, when_accepted
from jaxcb.request import Pooling, Request, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from jaxcb.engine.serving import ServingEngine

Text = str | Sequence[int]
"""Or its token ids."""
_OPEN_AT_ONCE = 1024
_ids = itertools.count()
_READ = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
_SCORED = dataclasses.replace(_READ, prompt_logprobs=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """How likely a continuation is after its context."""

    logprob: float
    """Natural logarithm of its probability: the sum of ``token_logprobs``."""
    is_greedy: bool
    """Greedy decoding would have written it: each of its tokens is the likeliest."""
    token_ids: Sequence[int]
    token_logprobs: Float[np.ndarray, "n"]


def embed_requests(engine: ServingEngine, texts: Sequence[Text], pooling: Pooling) -> list[Request]:
    """What :func:`embeddings` wants the outputs of."""
    if pooling is None:
        raise RequestError('pooling must be "last" or "mean", got None', param="pooling")
    if isinstance(texts, str):  # its letters would be texts too
        raise RequestError(f"texts must be a list of texts, got {validation.shown(texts)}", param="texts")
    return [
        Request(
            request_id=f"embed-{next(_ids)}",
            prompt_token_ids=_ids_of(engine, text, f"texts[{i}]"),
            sampling=_READ,
            arrival_s=time.monotonic(),
            pooling=pooling,
        )
        for i, text in enumerate(texts)
    ]


def embeddings(engine: ServingEngine, outputs: Iterable[RequestOutput], *, normalize: bool) -> Float[np.ndarray, "n E"]:
    rows = []
    for output in outputs:
        assert output.embedding is not None, "pooling asks for it"
        rows.append(output.embedding)
    values = np.stack(rows) if rows else np.zeros((0, engine.spec.hidden_size), np.float32)
    return values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-12) if normalize else values


def score_requests(engine: ServingEngine, pairs: Sequence[tuple[Text, Text]]) -> list[Request]:
    """What :func:`scores` wants the outputs of. A context and its continuation are read as one text, and cut where the
    context alone would end."""
    requests = []
    for i, pair in enumerate(pairs):
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise RequestError(
                f"pairs[{i}] must hold a context and a continuation, got {validation.shown(pair)}", param="pairs"
            )
        context, continuation = pair
        if isinstance(context, str) != isinstance(continuation, str):
            raise RequestError(f"pairs[{i}] must hold two strings or two lists of token ids", param="pairs")
        before = _ids_of(engine, context, f"pairs[{i}]")
        if isinstance(context, str) and isinstance(continuation, str):
            whole = _ids_of(engine, context + continuation, f"pairs[{i}]")
        else:
            whole = [*before, *_ids_of(engine, continuation, f"pairs[{i}]")]
        if not before:
            raise RequestError(
                f"pairs[{i}] has a context without tokens, and nothing says how likely a first token is: begin it with "
                "the model's BOS token",
                param="pairs",
            )
        requests.append(
            Request(
                request_id=f"score-{next(_ids)}",
                prompt_token_ids=whole,
                sampling=_SCORED,
                arrival_s=time.monotonic(),
                score_from=max(min(len(before), len(whole)), 1),
            )
        )
    return requests


def scores(requests: Sequence[Request], outputs: Iterable[RequestOutput]) -> list[Score]:
    results = []
    for request, output in zip(requests, outputs, strict=True):
        logprobs, count = output.prompt_logprobs, len(request.prompt_token_ids) - request.score_from
        values = np.zeros(0, np.float32) if not count or logprobs is None else logprobs.logprobs[-count:]
        ranks = [] if not count or logprobs is None else logprobs.ranks[-count:].tolist()
        results.append(
            Score(
                logprob=float(values.sum(dtype=np.float64)),
                is_greedy=all(rank == 1 for rank in ranks),
                token_ids=list(request.prompt_token_ids)[request.score_from :],
                token_logprobs=values,
            )
        )
    return results


def complete(engine: ServingEngine, requests: Sequence[Request]) -> Iterable[RequestOutput]:
    """Final outputs in order, with a bounded number of requests in the engine.

    Raises:
        RequestError: one is impossible; nothing was started.
        EngineStoppedError: the engine stopped.
    """
    for request in requests:
        engine.check_request(request)
    left, streams = deque(requests), deque[OutputStream]()
    try:
        while left or streams:
            while left and len(streams) < _OPEN_AT_ONCE:
                try:
                    streams.append(engine.submit_blocking(left[0]))
                except QueueFullError:
                    time.sleep(0.0 if streams else RETRY_S)
                    break
                left.popleft()
            if streams:
                yield _checked([*streams.popleft()][-1])
    finally:
        for stream in streams:
            stream.abort()


async def complete_async(engine: ServingEngine, requests: Sequence[Request]) -> list[RequestOutput]:
    """The same for a coroutine."""
    for request in requests:
        engine.check_request(request)

    async def one(request: Request) -> RequestOutput:
        async with await when_accepted(lambda: engine.submit(request)) as stream:
            last: RequestOutput | None = None
            async for output in stream:
                last = output
            assert last is not None, "a stream ends with an output"
            return _checked(last)

    return await gather(requests, one, at_once=_OPEN_AT_ONCE)


def _checked(output: RequestOutput) -> RequestOutput:
    if output.error is not None:
        raise EngineStoppedError(output.error)
    return output


def _ids_of(engine: ServingEngine, text: Text, where: str) -> list[int]:
    if isinstance(text, str):
        return engine.tokenizer.encode(text, max_tokens=engine.config.max_model_len)
    return validation.token_ids(where, text)
