"""/v1/chat/completions: messages through the model's own template, answers as an assistant's message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from jaxcb.errors import RequestError
from jaxcb.request import RequestOutput, SamplingParams
from jaxcb.serve.beams import BeamFields
from jaxcb.serve.call import Call, Face, Prompt, new_id, refuse_streamed_prompt_logprobs, wants_usage
from jaxcb.serve.fields import convert, decode_object, refuse_unsupported, take
from jaxcb.serve.logprobs import chat_logprobs, prompt_logprobs
from jaxcb.serve.requests import (
    CHAT_UNSUPPORTED,
    ChatFields,
    ChatMessage,
    IgnoredFields,
    SamplingFields,
    SchedulingFields,
)
from jaxcb.serve.responses import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    Delta,
    Usage,
)
from jaxcb.serve.structured import read_structured

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
        structured_outputs=structured,
    )
    if beams is None:
        sampling.params(
            defaults={}, logprobs=logprobs, structured_outputs=structured
        )  # refused before the template does its work
    token_ids = service.engine.tokenizer.apply_chat_template(
        [_message(message) for message in chat.messages], max_tokens=service.max_model_len
    )
    defaults = service.sampling_defaults(len(token_ids), None)
    if beams is None:
        params = sampling.params(
            defaults=defaults,
            logprobs=logprobs,
            prompt_logprobs=chat.prompt_logprobs,
            structured_outputs=structured,
        )
        searched = []
    else:
        room = max(service.max_model_len - len(token_ids), 1)
        searched = [beams.of(sampling, defaults["max_tokens"] or room)]
        params = SamplingParams(n=searched[0].width)
    limit_name = "max_tokens" if chat.max_completion_tokens is None else "max_completion_tokens"
    return Call(
        id=new_id("chatcmpl"),
        model=model,
        prompts=[Prompt(token_ids, params)],
        stream=bool(chat.stream),
        include_usage=include_usage,
        tokenizer=service.engine.tokenizer,
        scheduling=scheduling,
        num_prompt_logprobs=chat.prompt_logprobs,
        beams=searched,
        field_names={"prompt": "messages", "max_tokens": limit_name},
    )


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


def _message(message: ChatMessage) -> dict[str, Any]:
    """What the tokenizer takes. "developer" is OpenAI's newer name of the system role; templates know the older."""
    content: Any = message.content
    if not isinstance(content, str):
        content = [msgspec.structs.asdict(part) for part in content]
    role = "system" if message.role == "developer" else message.role
    named = {} if message.name is None else {"name": message.name}
    return {"role": role, "content": content, **named}


def _answer(call: Call, outputs: Sequence[RequestOutput], usage: Usage) -> ChatCompletion:
    return ChatCompletion(
        id=call.id,
        created=call.created,
        model=call.model,
        choices=[
            ChatChoice(
                index=index,
                message=AnswerMessage(content=output.text),
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
                logprobs=chat_logprobs(output.logprobs, call.tokenizer),
            )
            for index, output in enumerate(outputs)
        ],
        usage=usage,
        prompt_logprobs=UNSET
        if call.num_prompt_logprobs is None
        else prompt_logprobs(outputs[0].prompt_logprobs, call.tokenizer),
    )


def _chunks(call: Call, index: int, output: RequestOutput, first: bool) -> list[msgspec.Struct]:
    """The role comes alone and first; an output that added nothing and ends nothing is not worth a chunk."""
    chunks: list[msgspec.Struct] = []
    if first:
        chunks.append(_chunk(call, [ChatChunkChoice(index=index, delta=Delta(role="assistant", content=""))]))
    logprobs = output.new_logprobs
    if output.new_text or output.finished or logprobs:
        choice = ChatChunkChoice(
            index=index,
            delta=Delta(content=output.new_text or UNSET),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason if output.finished else UNSET,
            logprobs=chat_logprobs(logprobs, call.tokenizer),
        )
        chunks.append(_chunk(call, [choice]))
    return chunks


def _chunk(call: Call, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatChunk:
    return ChatChunk(
        id=call.id,
        created=call.created,
        model=call.model,
        choices=choices,
        usage=usage if call.include_usage else UNSET,
    )


def _usage_chunk(call: Call, usage: Usage) -> ChatChunk:
    return _chunk(call, [], usage)


FACE = Face(answer=_answer, chunks=_chunks, usage_chunk=_usage_chunk)
