"""Every route of the server, in one table: what it takes, what it answers, and who may ask. The application is built
from it, and so is the OpenAPI document."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from jaxcb.serve import (
    admin,
    anthropic_answer,
    anthropic_fields,
    chat,
    chat_answer,
    completions,
    embeddings,
    responses_answer,
    responses_fields,
    status,
    tokens,
)
from jaxcb.serve.answer import EventStream, answer_beams, answer_whole
from jaxcb.serve.beams import BeamFields
from jaxcb.serve.body import read_json_body
from jaxcb.serve.call import Call, Face
from jaxcb.serve.requests import (
    ChatFields,
    CompletionFields,
    IgnoredFields,
    PromptFields,
    SamplingFields,
    SchedulingFields,
    TemplateFields,
)
from jaxcb.serve.responses import ChatChunk, ChatCompletion, Completion, ModelCard, ModelList, json_response
from jaxcb.serve.service import Service
from jaxcb.serve.structured import StructuredFields
from jaxcb.serve.tools import ToolFields

Handler = Callable[[Request], Awaitable[ASGIApp]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One path and method.

    Arguments:
        fields: structs whose fields a body may have.
        without: fields of those that this endpoint refuses.
        answer: struct of the answer; None: it is text of another kind.
        chunks: struct of a stream's events; dict: they differ by their type.
        key: who may ask: anybody, whoever has the API key, whoever has the admin key.
    """

    path: str
    handler: Handler
    summary: str
    method: Literal["GET", "POST"] = "POST"
    fields: tuple[type[Any], ...] = ()
    without: tuple[str, ...] = ()
    answer: type[Any] | None = None
    chunks: type[Any] | None = None
    key: Literal["none", "api", "admin"] = "api"


async def chat_completions(request: Request) -> ASGIApp:
    return await _generate(request, chat.read, chat_answer.FACE)


async def text_completions(request: Request) -> ASGIApp:
    return await _generate(request, completions.read, completions.FACE)


async def responses(request: Request) -> ASGIApp:
    return await _generate(request, responses_fields.read, responses_answer.FACE)


async def messages(request: Request) -> ASGIApp:
    return await _generate(request, anthropic_fields.read, anthropic_answer.FACE)


async def count_tokens(request: Request) -> Response:
    service: Service = request.app.state.service
    async with service.reading():
        body = await read_json_body(request)
    count = await asyncio.to_thread(anthropic_fields.count, body, service)
    return json_response(anthropic_answer.TokenCount(count))


async def _generate(request: Request, read: Callable[[bytes, Service], Call], face: Face) -> ASGIApp:
    """Read, check and tokenise off the event loop (a long prompt must not stall other streams), submit, answer.

    A refusal happens before the answer begins, so a refused stream too has its own status.
    """
    service: Service = request.app.state.service
    async with service.reading():
        body = await read_json_body(request)
    call = await asyncio.to_thread(read, body, service)
    if call.beams:
        return await answer_beams(service, face, call, request.receive)
    streams = service.submit(call)
    if call.stream:
        return EventStream(service=service, face=face, call=call, streams=streams)
    return await answer_whole(service, face, call, streams, request.receive)


ENDPOINTS = (
    Endpoint(
        path="/v1/chat/completions",
        handler=chat_completions,
        summary="Answer a conversation (OpenAI).",
        fields=(
            ChatFields,
            ToolFields,
            StructuredFields,
            TemplateFields,
            SamplingFields,
            BeamFields,
            SchedulingFields,
            PromptFields,
            IgnoredFields,
        ),
        answer=ChatCompletion,
        chunks=ChatChunk,
    ),
    Endpoint(
        path="/v1/completions",
        handler=text_completions,
        summary="Continue prompts of text or token ids (OpenAI).",
        fields=(
            CompletionFields,
            StructuredFields,
            SamplingFields,
            BeamFields,
            SchedulingFields,
            PromptFields,
            IgnoredFields,
        ),
        answer=Completion,
        chunks=Completion,
    ),
    Endpoint(
        path="/v1/responses",
        handler=responses,
        summary="Answer a conversation with a list of items (OpenAI). Nothing is stored.",
        fields=(
            responses_fields.ResponsesFields,
            TemplateFields,
            SamplingFields,
            SchedulingFields,
            IgnoredFields,
        ),
        without=("n", "max_tokens"),
        answer=responses_answer.ResponseBody,
        chunks=dict,
    ),
    Endpoint(
        path="/v1/messages",
        handler=messages,
        summary="Answer a conversation (Anthropic).",
        fields=(anthropic_fields.MessagesFields, SamplingFields, SchedulingFields),
        without=("n", "stop"),
        answer=anthropic_answer.MessageBody,
        chunks=dict,
    ),
    Endpoint(
        path="/v1/messages/count_tokens",
        handler=count_tokens,
        summary="Tokens of the prompt that /v1/messages would make (Anthropic).",
        fields=(anthropic_fields.CountFields,),
        answer=anthropic_answer.TokenCount,
    ),
    Endpoint(
        path="/v1/embeddings",
        handler=embeddings.embeddings,
        summary="Embeddings of texts (OpenAI).",
        fields=(embeddings.EmbeddingFields,),
        answer=embeddings.EmbeddingList,
    ),
    Endpoint(
        path="/v1/score",
        handler=embeddings.score,
        summary="How likely continuations are behind their contexts.",
        fields=(embeddings.ScoreFields,),
        answer=embeddings.ScoreList,
    ),
    Endpoint(
        path="/v1/models", handler=status.models, method="GET", summary="The names of the model.", answer=ModelList
    ),
    Endpoint(
        path="/v1/models/{name:path}",
        handler=status.model,
        method="GET",
        summary="One name of the model.",
        answer=ModelCard,
    ),
    Endpoint(
        path="/tokenize",
        handler=tokens.tokenize,
        summary="Token ids of a prompt or a conversation.",
        fields=(tokens.TokenizeFields, TemplateFields, ToolFields),
        answer=tokens.Tokens,
    ),
    Endpoint(
        path="/detokenize",
        handler=tokens.detokenize,
        summary="The text of token ids.",
        fields=(tokens.DetokenizeFields,),
        answer=tokens.PromptText,
    ),
    Endpoint(
        path="/apply_template",
        handler=tokens.apply_template,
        summary="The prompt that the model's chat template makes of a conversation.",
        fields=(tokens.TemplateRequestFields, TemplateFields, ToolFields),
        answer=tokens.PromptText,
    ),
    Endpoint(
        path="/health",
        handler=status.health,
        method="GET",
        summary="Whether the engine is alive: 503 when it stopped, or made no step for 60 s with work to do.",
        answer=status.Status,
        key="none",
    ),
    Endpoint(
        path="/ready",
        handler=status.ready,
        method="GET",
        summary="Whether requests should be sent here.",
        answer=status.Status,
        key="none",
    ),
    Endpoint(
        path="/version",
        handler=status.version,
        method="GET",
        summary="The version of jaxcb.",
        answer=status.Version,
        key="none",
    ),
    Endpoint(
        path="/load",
        handler=status.load,
        method="GET",
        summary="Requests that are here, and the KV memory that they hold.",
        answer=status.Load,
        key="none",
    ),
    Endpoint(
        path="/metrics", handler=status.metrics, method="GET", summary="Counters and times, for Prometheus.", key="none"
    ),
    Endpoint(
        path="/pause",
        handler=admin.pause,
        summary="Make no more steps: what runs keeps its pages, what comes waits.",
        answer=status.Status,
        key="admin",
    ),
    Endpoint(path="/resume", handler=admin.resume, summary="End the pause.", answer=status.Status, key="admin"),
    Endpoint(
        path="/reset_prefix_cache",
        handler=admin.reset_prefix_cache,
        summary="Forget every cached prefix.",
        answer=status.Status,
        key="admin",
    ),
    Endpoint(
        path="/start_profile",
        handler=admin.start_profile,
        summary="Start jax's profiler.",
        answer=admin.Profile,
        key="admin",
    ),
    Endpoint(
        path="/stop_profile",
        handler=admin.stop_profile,
        summary="Stop it; the answer says where its files are.",
        answer=admin.Profile,
        key="admin",
    ),
    Endpoint(
        path="/log_level",
        handler=admin.log_level,
        method="GET",
        summary="How much is logged.",
        answer=admin.LogLevel,
        key="admin",
    ),
    Endpoint(
        path="/log_level",
        handler=admin.log_level,
        summary="Log more or less.",
        fields=(admin.LogLevel,),
        answer=admin.LogLevel,
        key="admin",
    ),
)
