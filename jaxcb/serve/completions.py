"""/v1/completions: raw prompts (text or token ids, one or several), answers as text."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec import UNSET

from jaxcb.errors import RequestError
from jaxcb.request import RequestOutput
from jaxcb.serve.call import Call, Face, Prompt, new_id, wants_usage
from jaxcb.serve.fields import convert, decode_object, refuse_unsupported, take
from jaxcb.serve.logprobs import text_logprobs
from jaxcb.serve.requests import (
    COMPLETION_UNSUPPORTED,
    CompletionFields,
    IgnoredFields,
    SamplingFields,
    SchedulingFields,
)
from jaxcb.serve.responses import Completion, TextChoice, Usage

if TYPE_CHECKING:
    from jaxcb.serve.service import Service

T = TypeVar("T")
DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this endpoint."""
MAX_PROMPTS = 1024
"""Most prompts in one HTTP request."""


def read(body: bytes, service: Service) -> Call:
    """Check a body and tokenise its prompts. Slow for long prompts: call it off the event loop.

    Raises:
        RequestError, ApiError: what is wrong, naming the field.
    """
    fields = decode_object(body)
    refuse_unsupported(fields, COMPLETION_UNSUPPORTED)
    sampling = take(fields, SamplingFields)
    scheduling = take(fields, SchedulingFields).given(service.engine.config.policy)
    take(fields, IgnoredFields)
    completion = convert(fields, CompletionFields)
    model = service.check_model(completion.model)
    include_usage = wants_usage(completion.stream, completion.stream_options)
    best_of = None if completion.best_of == (sampling.n or 1) else completion.best_of
    if best_of is not None and completion.stream:
        raise RequestError("best_of can't be streamed: which answer is best is known at the end", param="best_of")
    prompts = _prompts(completion.prompt, service)
    return Call(
        id=new_id("cmpl"),
        model=model,
        prompts=[
            Prompt(
                ids,
                sampling.params(
                    defaults=service.sampling_defaults(len(ids), DEFAULT_MAX_TOKENS),
                    best_of=best_of,
                    logprobs=completion.logprobs,
                ),
            )
            for ids in prompts
        ],
        stream=bool(completion.stream),
        include_usage=include_usage,
        tokenizer=service.engine.tokenizer,
        scheduling=scheduling,
    )


def _prompts(prompt: str | list[str | int | list[int]], service: Service) -> list[Sequence[int]]:
    """One list of token ids a prompt, in order.

    Raises:
        RequestError: no prompt, too many, an empty one, or a list that mixes text, ids and lists of ids.
    """
    encode = functools.partial(service.engine.tokenizer.encode, max_tokens=service.max_model_len)
    if isinstance(prompt, str):
        prompts: list[Sequence[int]] = [encode(prompt)]
    elif not prompt:
        raise RequestError("prompt is an empty list: send text or token ids", param="prompt")
    elif ids := _all_of(int, prompt):
        prompts = [ids]
    elif len(prompt) > MAX_PROMPTS:
        raise RequestError(f"prompt holds {len(prompt)} prompts, at most {MAX_PROMPTS} are supported", param="prompt")
    elif texts := _all_of(str, prompt):
        prompts = [encode(text) for text in texts]
    elif id_lists := _all_of(list, prompt):
        prompts = list(id_lists)
    else:
        raise RequestError("prompt must hold either strings, or token ids, or lists of token ids", param="prompt")
    for index, token_ids in enumerate(prompts):
        if not token_ids:
            raise RequestError(f"prompt {index} has no tokens", param="prompt")
    return prompts


def _all_of(kind: type[T], values: Sequence[object]) -> list[T]:
    """``values`` if all of them are of ``kind``, else an empty list."""
    same = [value for value in values if isinstance(value, kind)]
    return same if len(same) == len(values) else []


def _answer(call: Call, outputs: Sequence[RequestOutput], usage: Usage) -> Completion:
    return Completion(
        id=call.id,
        created=call.created,
        model=call.model,
        choices=[
            TextChoice(
                index=index,
                text=output.text,
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
                logprobs=text_logprobs(output.logprobs, call.tokenizer),
            )
            for index, output in enumerate(outputs)
        ],
        usage=usage,
    )


def _chunks(call: Call, index: int, output: RequestOutput, first: bool) -> list[msgspec.Struct]:
    """An output that added nothing and ends nothing is not worth a chunk."""
    logprobs = output.new_logprobs
    if not output.new_text and not output.finished and not logprobs:
        return []
    choice = TextChoice(
        index=index,
        text=output.new_text,
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason if output.finished else UNSET,
        logprobs=text_logprobs(logprobs, call.tokenizer, len(output.text) - len(output.new_text)),
    )
    return [_chunk(call, [choice])]


def _chunk(call: Call, choices: list[TextChoice], usage: Usage | None = None) -> Completion:
    return Completion(
        id=call.id,
        created=call.created,
        model=call.model,
        choices=choices,
        usage=usage if call.include_usage else UNSET,
    )


def _usage_chunk(call: Call, usage: Usage) -> Completion:
    return _chunk(call, [], usage)


FACE = Face(answer=_answer, chunks=_chunks, usage_chunk=_usage_chunk)
