"""/v1/chat/completions: what it reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from jaxcb.errors import RequestError
from jaxcb.request import SamplingParams
from jaxcb.serve.beams import BeamFields
from jaxcb.serve.call import Call, Prompt, new_id, refuse_streamed_prompt_logprobs, wants_usage
from jaxcb.serve.conversation import Conversation
from jaxcb.serve.fields import convert, decode_object, only_functions, refuse_unsupported, take
from jaxcb.serve.requests import (
    CHAT_UNSUPPORTED,
    ChatFields,
    ChatMessage,
    IgnoredFields,
    PromptFields,
    SamplingFields,
    SchedulingFields,
    TemplateFields,
    check_counted,
)
from jaxcb.serve.structured import read_structured
from jaxcb.serve.tools import ToolFields

if TYPE_CHECKING:
    from jaxcb.serve.service import Service


def read(body: bytes, service: Service) -> Call:
    """Check a body and build its prompt. Slow for long prompts: call it off the event loop.

    Raises:
        RequestError, ApiError: what is wrong, naming the field.
    """
    fields = decode_object(body)
    refuse_unsupported(fields, CHAT_UNSUPPORTED)
    structured = read_structured(fields, service.engine)
    sampling = take(fields, SamplingFields)
    scheduling = take(fields, SchedulingFields).given(service.engine.config.policy)
    beam = take(fields, BeamFields)
    template = take(fields, TemplateFields)
    only_functions(fields)
    choice = take(fields, ToolFields).choice()
    about_prompt = take(fields, PromptFields)
    take(fields, IgnoredFields)
    chat = convert(fields, ChatFields)
    model = service.check_model(chat.model)
    if not chat.messages:
        raise RequestError("messages must hold at least one message", param="messages")
    include_usage = wants_usage(chat.stream, chat.stream_options)
    if chat.top_logprobs and not chat.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    logprobs = (chat.top_logprobs or 0) if chat.logprobs else None
    refuse_streamed_prompt_logprobs(chat.stream, chat.prompt_logprobs)
    sampling = _one_limit(sampling, chat.max_completion_tokens)
    beams = beam.params(
        sampling,
        stream=chat.stream,
        logprobs=chat.logprobs,
        prompt_logprobs=chat.prompt_logprobs,
        tools=choice.usable() or None,
        return_token_ids=about_prompt.return_token_ids,
        structured_outputs=structured,
    )
    if beams is None:
        # refused before the template does its work
        sampling.params(defaults={}, logprobs=logprobs, structured_outputs=structured)
    conversation = Conversation(messages=plain_messages(chat.messages), choice=choice, **template.given())
    conversation = conversation.with_effort(chat.reasoning_effort, service)
    text = conversation.render(service)
    longest = about_prompt.longest_text(service.max_model_len)
    if longest is None:
        check_counted("messages", text)
    token_ids = about_prompt.cut(service.engine.tokenizer.encode_chat(text, max_tokens=longest), service.max_model_len)
    defaults = service.sampling_defaults(len(token_ids), None)
    if beams is None:
        own = conversation.sampling(service, text, structured)
        params = sampling.params(defaults=defaults, logprobs=logprobs, prompt_logprobs=chat.prompt_logprobs, **own)
        searched = []
    else:
        room = max(service.max_model_len - len(token_ids), 1)
        searched = [beams.of(sampling, defaults["max_tokens"] or room)]
        params = SamplingParams(n=searched[0].width)
    limit_name = "max_tokens" if chat.max_completion_tokens is None else "max_completion_tokens"
    return Call(
        id=new_id("chatcmpl-"),
        model=model,
        prompts=[Prompt(token_ids, params)],
        stream=bool(chat.stream),
        include_usage=include_usage,
        tokenizer=service.engine.tokenizer,
        scheduling=scheduling,
        return_token_ids=bool(about_prompt.return_token_ids),
        num_prompt_logprobs=chat.prompt_logprobs,
        beams=searched,
        reading=conversation.reading(service, text),
        include_reasoning=chat.include_reasoning is not False,
        new_call_id=conversation.format(service).new_id,
        field_names={"prompt": "messages", "max_tokens": limit_name},
    )


def plain_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """What the tokenizer takes. "developer" is OpenAI's newer name of the system role; templates know the older.

    Raises:
        RequestError: a message has no content, or calls a function with arguments that are no JSON object.
    """
    return [_plain(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _plain(where: str, message: ChatMessage) -> dict[str, Any]:
    if message.content is None and not message.tool_calls:
        raise RequestError(f"{where}.content: expected text, got none", param=f"{where}.content")
    content: Any = message.content
    if isinstance(content, list):
        content = [msgspec.structs.asdict(part) for part in content]
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": content}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            plain[name] = getattr(message, name)
    if message.tool_calls:
        plain["tool_calls"] = []
        for index, call in enumerate(message.tool_calls):
            try:
                plain["tool_calls"].append(call.plain())
            except ValueError as error:
                param = f"{where}.tool_calls[{index}].function.arguments"
                raise RequestError(f"{param} must be a JSON object: {error}", param=param) from error
    return plain


def _one_limit(sampling: SamplingFields, max_completion_tokens: int | None) -> SamplingFields:
    """``max_completion_tokens`` is the newer name of ``max_tokens``."""
    if max_completion_tokens is None:
        return sampling
    if sampling.max_tokens not in (None, max_completion_tokens):
        raise RequestError(
            f"max_tokens ({sampling.max_tokens}) and max_completion_tokens ({max_completion_tokens}) name the same "
            "limit: send one of them",
            param="max_tokens",
        )
    return msgspec.structs.replace(sampling, max_tokens=max_completion_tokens)
