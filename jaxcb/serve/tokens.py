"""/tokenize, /detokenize, /apply_template: the prompt of a request, without an answer. The fields have vLLM's names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from jaxcb import validation
from jaxcb.errors import RequestError
from jaxcb.serve.body import read_json_body
from jaxcb.serve.chat import plain_messages
from jaxcb.serve.conversation import Conversation
from jaxcb.serve.fields import convert, decode_object, only_functions, take
from jaxcb.serve.requests import ChatMessage, TemplateFields, check_counted
from jaxcb.serve.responses import json_response
from jaxcb.serve.service import Service
from jaxcb.serve.tools import ToolFields


class TokenizeFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: ``prompt``, or ``messages`` with what renders them. ``add_special_tokens`` is of prompts."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TemplateRequestFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /apply_template."""

    messages: list[ChatMessage]
    model: str | None = None


class DetokenizeFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize. Special tokens are shown, unless ``skip_special_tokens``."""

    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool | None = None


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType | None = UNSET


class PromptText(msgspec.Struct, frozen=True):
    prompt: str


async def tokenize(request: Request) -> Response:
    return await _off_loop(request, _tokenize)


async def detokenize(request: Request) -> Response:
    return await _off_loop(request, _detokenize)


async def apply_template(request: Request) -> Response:
    return await _off_loop(request, _apply_template)


async def _off_loop(request: Request, answer: Callable[[dict[str, Any], Service], msgspec.Struct]) -> Response:
    """On a thread: a long text must not stall the streams."""
    service: Service = request.app.state.service
    async with service.reading():
        body = await read_json_body(request)
    return json_response(await asyncio.to_thread(lambda: answer(decode_object(body), service)))


def _tokenize(fields: dict[str, Any], service: Service) -> Tokens:
    rendering = {name: fields.pop(name) for name in _RENDERING & fields.keys()}
    given = convert(fields, TokenizeFields)
    service.check_model(given.model)
    if (given.prompt is None) == (given.messages is None):
        raise RequestError("send either prompt or messages", param="prompt")
    tokenizer = service.engine.tokenizer
    if given.messages is not None:
        if given.add_special_tokens:
            raise RequestError("add_special_tokens: the template writes what belongs there", param="add_special_tokens")
        text = _render(given.messages, rendering, service)
        check_counted("messages", text)
        ids = tokenizer.encode_chat(text)
    else:
        if name := next((name for name in rendering if rendering[name] is not None), None):
            raise RequestError(f"{name} needs messages", param=name)
        assert given.prompt is not None
        check_counted("prompt", given.prompt)
        ids = tokenizer.encode(given.prompt, add_special_tokens=given.add_special_tokens is not False)
    return Tokens(
        count=len(ids),
        max_model_len=service.max_model_len,
        tokens=ids,
        token_strs=[tokenizer.token_bytes(token).decode(errors="replace") for token in ids]
        if given.return_token_strs
        else UNSET,
    )


def _detokenize(fields: dict[str, Any], service: Service) -> PromptText:
    given = convert(fields, DetokenizeFields)
    service.check_model(given.model)
    validation.check_vocabulary("tokens", given.tokens, service.engine.spec.vocab_size)
    skip = bool(given.skip_special_tokens)
    return PromptText(service.engine.tokenizer.decode(given.tokens, skip_special_tokens=skip))


def _apply_template(fields: dict[str, Any], service: Service) -> PromptText:
    rendering = {name: fields.pop(name) for name in _RENDERING & fields.keys()}
    given = convert(fields, TemplateRequestFields)
    service.check_model(given.model)
    return PromptText(_render(given.messages, rendering, service))


_RENDERING = frozenset({*TemplateFields.__struct_fields__, *ToolFields.__struct_fields__})


def _render(messages: list[ChatMessage], rendering: dict[str, Any], service: Service) -> str:
    only_functions(rendering)
    choice = take(rendering, ToolFields).choice()
    template = take(rendering, TemplateFields)
    conversation = Conversation(messages=plain_messages(messages), choice=choice, **template.given())
    return conversation.render(service)
