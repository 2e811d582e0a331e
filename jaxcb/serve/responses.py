"""What the endpoints answer, in OpenAI's words. ``stop_reason`` is vLLM's extra."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from jaxcb.request import FinishReason, RequestOutput
from jaxcb.serve.logprobs import ChatLogprobs, PromptLogprobs, TextLogprobs
from jaxcb.serve.tools import ToolCall


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    """Of models that reason."""

    @classmethod
    def of(cls, outputs: Sequence[RequestOutput], *, echo_only: bool = False) -> Usage:
        """The sums over the finished sequences of one HTTP request. A prompt counts once, however many answers it
        has; every answer counts, those that ``best_of`` left out too, but for tokens that were not asked for."""
        prompt = sum(len(output.prompt_token_ids) for output in outputs if output.index == 0)
        generated = 0 if echo_only else sum(len(output.token_ids) for output in outputs)
        cached = sum(output.num_cached_tokens for output in outputs if output.index == 0)
        return cls(
            prompt_tokens=prompt,
            completion_tokens=generated,
            total_tokens=prompt + generated,
            prompt_tokens_details=PromptTokensDetails(cached),
        )


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True):
    """``reasoning_content`` is DeepSeek's extra; ``content`` is null beside calls that came without text."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: AnswerMessage
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    """vLLM's extra, where it was asked for."""


class FunctionDelta(msgspec.Struct, frozen=True, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The first of a call has its id and name; the arguments of all concatenate."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: Delta
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """``usage`` is there (null until the last chunk) only when the client asked for it."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | UnsetType = UNSET
    usage: Usage | UnsetType | None = UNSET


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A choice of a completion, and of a chunk of one."""

    index: int
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    logprobs: TextLogprobs | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    """vLLM's extra, where it was asked for."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A completion, and a chunk of one (which has a ``usage`` as :class:`ChatChunk` has)."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "jaxcb"
    root: str
    """The engine's own name of the model."""
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


def json_response(value: Any, status: int = 200) -> Response:
    return Response(encode(value), status_code=status, media_type="application/json")


def encode(value: Any) -> bytes:
    """JSON bytes. msgspec writes NaN and Infinity as null, so the result is always valid."""
    return msgspec.json.encode(value)
