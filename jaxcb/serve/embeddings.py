"""/v1/embeddings (OpenAI's) and /v1/score (log-likelihoods of continuations): prompts that are read, not answered."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jaxcb.errors import RequestError
from jaxcb.request import Request, RequestOutput
from jaxcb.serve.answer import read_prompts
from jaxcb.serve.body import read_json_body
from jaxcb.serve.completions import check_prompts, split_prompts
from jaxcb.serve.fields import convert, decode_object
from jaxcb.serve.responses import json_response
from jaxcb.serve.service import Service

Prompts = str | list[str | int | list[int]]


class EmbeddingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/embeddings. ``pooling`` and ``normalize`` are our own: the last token's state or the mean of all, and
    whether it is divided by its length."""

    input: Prompts
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    pooling: Literal["last", "mean"] | None = None
    normalize: bool | None = None


class ScoreFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/score: texts, or token ids, or lists of either. One context goes with every continuation."""

    context: Prompts
    continuation: Prompts
    model: str | None = None


class ReadUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingItem(msgspec.Struct, frozen=True, kw_only=True):
    """``embedding`` is a list of numbers, or their float32 in base64 (little-endian)."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[EmbeddingItem]
    model: str
    usage: ReadUsage


class ScoreItem(msgspec.Struct, frozen=True, kw_only=True):
    """``score`` is the natural logarithm of the continuation's probability, the sum of ``token_logprobs``;
    ``is_greedy``: greedy decoding would have written it."""

    object: str = "score"
    index: int
    score: float
    is_greedy: bool
    token_ids: list[int]
    token_logprobs: list[float]


class ScoreList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[ScoreItem]
    model: str
    usage: ReadUsage


async def embeddings(request: HttpRequest) -> Response:
    from jaxcb.engine import scoring

    service: Service = request.app.state.service
    async with service.reading():
        body = await read_json_body(request)
    given, model, requests = await asyncio.to_thread(_embed_requests, body, service)
    outputs = await read_prompts(service, requests, {"prompt": "input"}, request.receive)
    rows = scoring.embeddings(service.engine, outputs, normalize=given.normalize is not False)
    as_text = given.encoding_format == "base64"
    data = [
        EmbeddingItem(index=index, embedding=_base64(row) if as_text else row.tolist())
        for index, row in enumerate(rows)
    ]
    return json_response(EmbeddingList(data=data, model=model, usage=_usage(outputs)))


async def score(request: HttpRequest) -> Response:
    from jaxcb.engine import scoring

    service: Service = request.app.state.service
    async with service.reading():
        body = await read_json_body(request)
    model, requests = await asyncio.to_thread(_score_requests, body, service)
    outputs = await read_prompts(service, requests, {"prompt": "context"}, request.receive)
    data = [
        ScoreItem(
            index=index,
            score=one.logprob,
            is_greedy=one.is_greedy,
            token_ids=list(one.token_ids),
            token_logprobs=one.token_logprobs.tolist(),
        )
        for index, one in enumerate(scoring.scores(requests, outputs))
    ]
    return json_response(ScoreList(data=data, model=model, usage=_usage(outputs)))


def _embed_requests(body: bytes, service: Service) -> tuple[EmbeddingFields, str, list[Request]]:
    from jaxcb.engine import scoring

    given = convert(decode_object(body), EmbeddingFields)
    model = service.check_model(given.model)
    size = service.engine.spec.hidden_size
    if given.dimensions not in (None, size):
        raise RequestError(
            f"dimensions must be {size}, the model's own, or left out; got {given.dimensions}", param="dimensions"
        )
    texts = split_prompts(given.input, "input")
    requests = _named("input", lambda: scoring.embed_requests(service.engine, texts, given.pooling or "last"))
    check_prompts([request.prompt_token_ids for request in requests], "input")
    return given, model, requests


def _score_requests(body: bytes, service: Service) -> tuple[str, list[Request]]:
    from jaxcb.engine import scoring

    given = convert(decode_object(body), ScoreFields)
    model = service.check_model(given.model)
    contexts = split_prompts(given.context, "context")
    continuations = split_prompts(given.continuation, "continuation")
    if len(contexts) == 1:
        contexts = contexts * len(continuations)
    if len(contexts) != len(continuations):
        raise RequestError(
            f"context must be one, or as many as continuation has ({len(continuations)}), got {len(contexts)}",
            param="context",
        )
    for index, (one, other) in enumerate(zip(contexts, continuations, strict=True)):
        if isinstance(one, str) != isinstance(other, str):
            raise RequestError(
                f"continuation[{index}] must be of its context's kind: both text, or both token ids",
                param="continuation",
            )
    pairs = list(zip(contexts, continuations, strict=True))
    return model, _named("context", lambda: scoring.score_requests(service.engine, pairs))


def _named(name: str, build: Any) -> list[Request]:
    """What ``build`` returns; its errors go by the name of the body's field."""
    try:
        return build()
    except RequestError as error:
        raise RequestError(re.sub(r"^(texts|pairs)\[", f"{name}[", str(error)), param=name) from error


def _usage(outputs: Sequence[RequestOutput]) -> ReadUsage:
    count = sum(len(output.prompt_token_ids) for output in outputs)
    return ReadUsage(count, count)


def _base64(row: np.ndarray) -> str:
    return base64.b64encode(row.astype("<f4").tobytes()).decode()
