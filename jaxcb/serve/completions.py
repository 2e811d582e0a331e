"""/v1/completions: raw prompts (text or token ids, one or several), answers as text."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import UNSET

from jaxcb import validation
from jaxcb.errors import RequestError
from jaxcb.logprobs import Logprobs
from jaxcb.request import FinishReason, RequestOutput, SamplingParams
from jaxcb.serve.beams import BeamFields
from jaxcb.serve.call import Call, Face, Prompt, new_id, refuse_streamed_prompt_logprobs, wants_usage
from jaxcb.serve.fields import convert, decode_object, refuse_unsupported, take
from jaxcb.serve.logprobs import TextLogprobs, echoed_logprobs, prompt_logprobs, text_logprobs
from jaxcb.serve.requests import (
    COMPLETION_UNSUPPORTED,
    CompletionFields,
    IgnoredFields,
    PromptFields,
    SamplingFields,
    SchedulingFields,
    check_counted,
)
from jaxcb.serve.responses import Completion, TextChoice, Usage
from jaxcb.serve.sse import Writer, event
from jaxcb.serve.structured import read_structured

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
    structured = read_structured(fields, service.engine)
    sampling = take(fields, SamplingFields)
    scheduling = take(fields, SchedulingFields).given(service.engine.config.policy)
    beam = take(fields, BeamFields)
    about_prompt = take(fields, PromptFields)
    take(fields, IgnoredFields)
    completion = convert(fields, CompletionFields)
    model = service.check_model(completion.model)
    include_usage = wants_usage(completion.stream, completion.stream_options)
    best_of = None if completion.best_of == (sampling.n or 1) else completion.best_of
    if best_of is not None and completion.stream:
        raise RequestError("best_of can't be streamed: which answer is best is known at the end", param="best_of")
    refuse_streamed_prompt_logprobs(completion.stream, completion.prompt_logprobs)
    beams = beam.params(
        sampling,
        stream=completion.stream,
        best_of=best_of,
        echo=completion.echo,
        logprobs=completion.logprobs,
        prompt_logprobs=completion.prompt_logprobs,
        structured_outputs=structured,
        return_token_ids=about_prompt.return_token_ids,
    )
    echo = bool(completion.echo)
    echo_only = echo and sampling.max_tokens == 0  # OpenAI's way to have a text scored
    if echo_only:
        if sampling.min_tokens:
            raise RequestError(
                f"min_tokens must be at most max_tokens, got {sampling.min_tokens} > 0", param="min_tokens"
            )
        sampling = msgspec.structs.replace(sampling, max_tokens=1)
    prompt_logprobs = completion.prompt_logprobs
    if echo and completion.logprobs is not None:
        prompt_logprobs = max(completion.logprobs, prompt_logprobs or 0)
    prompts = _prompts(completion.prompt, about_prompt, service)
    sent = completion.prompt if about_prompt.truncate_prompt_tokens is None else prompts
    if beams is not None:
        return _beam_call(beams, sampling, prompts, model, scheduling, service)
    return Call(
        id=new_id("cmpl-"),
        model=model,
        prompts=[
            Prompt(
                ids,
                sampling.params(
                    defaults=service.sampling_defaults(len(ids), DEFAULT_MAX_TOKENS),
                    best_of=best_of,
                    logprobs=completion.logprobs,
                    prompt_logprobs=prompt_logprobs,
                    structured_outputs=structured,
                ),
                text,
            )
            for ids, text in zip(
                prompts, _texts(sent, prompts, service) if echo else [None] * len(prompts), strict=True
            )
        ],
        stream=bool(completion.stream),
        include_usage=include_usage,
        tokenizer=service.engine.tokenizer,
        scheduling=scheduling,
        return_token_ids=bool(about_prompt.return_token_ids),
        echo_only=echo_only,
        num_prompt_logprobs=completion.prompt_logprobs,
    )


def _beam_call(
    fields: BeamFields,
    sampling: SamplingFields,
    prompts: Sequence[Sequence[int]],
    model: str,
    scheduling: Mapping[str, Any],
    service: Service,
) -> Call:
    limits = [service.sampling_defaults(len(ids), DEFAULT_MAX_TOKENS)["max_tokens"] for ids in prompts]
    beams = [fields.of(sampling, limit) for limit in limits]
    return Call(
        id=new_id("cmpl-"),
        model=model,
        prompts=[Prompt(ids, SamplingParams(n=beams[0].width)) for ids in prompts],
        stream=False,
        include_usage=False,
        tokenizer=service.engine.tokenizer,
        scheduling=scheduling,
        beams=beams,
    )


def _texts(prompt: object, prompts: Sequence[Sequence[int]], service: Service) -> Iterator[str]:
    """What each prompt reads as: the text that was sent, or that of the ids.

    Raises:
        RequestError: an id is outside the vocabulary, and so has no text.
    """
    sent = [prompt] if isinstance(prompt, str) else prompt if isinstance(prompt, list) else []
    for index, ids in enumerate(prompts):
        text = sent[index] if index < len(sent) else None
        validation.check_vocabulary("prompt", ids, service.engine.spec.vocab_size)
        yield text if isinstance(text, str) else service.engine.tokenizer.decode(ids, skip_special_tokens=False)


def _prompts(prompt: str | list[str | int | list[int]], about: PromptFields, service: Service) -> list[Sequence[int]]:
    """One list of token ids a prompt, in order.

    Raises:
        RequestError: no prompt, too many, an empty one, or a list that mixes text, ids and lists of ids.
    """
    longest = about.longest_text(service.max_model_len)
    encode = functools.partial(service.engine.tokenizer.encode, max_tokens=longest)
    given = split_prompts(prompt, "prompt")
    if longest is None:
        check_counted("prompt", *(one for one in given if isinstance(one, str)))
    prompts: list[Sequence[int]] = [encode(one) if isinstance(one, str) else one for one in given]
    check_prompts(prompts, "prompt")
    return [about.cut(token_ids, service.max_model_len) for token_ids in prompts]


def split_prompts(prompt: str | list[str | int | list[int]], name: str) -> list[str | list[int]]:
    """The texts, or lists of token ids, that the field ``name`` holds: one of either, or a list of them.

    Raises:
        RequestError: there is none, there are too many, or a list mixes them.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError(f"{name} is an empty list: send text or token ids", param=name)
    if ids := _all_of(int, prompt):
        return [ids]
    if len(prompt) > MAX_PROMPTS:
        raise RequestError(f"{name} holds {len(prompt)} prompts, at most {MAX_PROMPTS} are supported", param=name)
    if texts := _all_of(str, prompt):
        return list(texts)
    if id_lists := _all_of(list, prompt):
        return list(id_lists)
    raise RequestError(f"{name} must hold either strings, or token ids, or lists of token ids", param=name)


def check_prompts(prompts: Sequence[Sequence[int]], name: str) -> None:
    """Raise RequestError where one has no tokens."""
    for index, token_ids in enumerate(prompts):
        if not token_ids:
            raise RequestError(f"{name} {index} has no tokens", param=name)


def _all_of(kind: type[T], values: Sequence[object]) -> list[T]:
    """``values`` if all of them are of ``kind``, else an empty list."""
    same = [value for value in values if isinstance(value, kind)]
    return same if len(same) == len(values) else []


def _answer(call: Call, outputs: Sequence[RequestOutput], usage: Usage) -> Completion:
    return Completion(
        id=call.id,
        created=call.created,
        model=call.model,
        choices=[_choice(call, index, output) for index, output in enumerate(outputs)],
        usage=usage,
    )


def _choice(call: Call, index: int, output: RequestOutput) -> TextChoice:
    prompt, k = call.prompt_of(index), call.num_prompt_logprobs
    scored = output.prompt_logprobs
    return TextChoice(
        index=index,
        text=(prompt.echo or "") + ("" if call.echo_only else output.text),
        finish_reason=FinishReason.LENGTH if call.echo_only else output.finish_reason,
        stop_reason=None if call.echo_only else output.stop_reason,
        logprobs=_logprobs(call, prompt, output, output.logprobs),
        prompt_token_ids=list(prompt.token_ids) if call.return_token_ids else UNSET,
        token_ids=list(output.token_ids) if call.return_token_ids else UNSET,
        prompt_logprobs=UNSET
        if k is None
        else prompt_logprobs(None if scored is None else scored.limited(k), call.tokenizer),
    )


def _logprobs(
    call: Call, prompt: Prompt, output: RequestOutput, answer: Logprobs | None, offset: int = 0
) -> TextLogprobs | None:
    """Of an answer or a piece of one, behind those of the prompt where that is echoed and nothing was sent yet."""
    k = prompt.sampling.logprobs
    if k is None or prompt.echo is None or offset:
        return text_logprobs(answer, call.tokenizer, offset)
    scored = None if output.prompt_logprobs is None else output.prompt_logprobs.limited(k)
    return echoed_logprobs(prompt.token_ids, scored, None if call.echo_only else answer, call.tokenizer)


class _Writer(Writer):
    """Chunks of choices; an output that added nothing and ends nothing is not worth one."""

    def __init__(self, call: Call):
        self._call = call
        self._offsets: dict[int, int] = {}
        """Characters of the tokens with log-probabilities sent so far, by choice."""

    def chunk(self, index: int, output: RequestOutput, first: bool) -> bytes:
        call, prompt = self._call, self._call.prompt_of(index)
        echo = prompt.echo if first else None
        new_text = "" if call.echo_only else output.new_text
        ids = call.return_token_ids and (first or output.new_token_ids)
        if not new_text and not echo and not output.finished and not output.new_logprobs and not ids:
            return b""
        logprobs = _logprobs(call, prompt, output, output.new_logprobs, self._offsets.get(index, 0))
        if logprobs is not None:
            self._offsets[index] = max(logprobs.end_offset, self._offsets.get(index, 0))
        choice = TextChoice(
            index=index,
            text=(echo or "") + new_text,
            finish_reason=FinishReason.LENGTH if call.echo_only and output.finished else output.finish_reason,
            stop_reason=UNSET if not output.finished else None if call.echo_only else output.stop_reason,
            logprobs=logprobs,
            prompt_token_ids=list(prompt.token_ids) if call.return_token_ids and first else UNSET,
            token_ids=list(output.new_token_ids) if call.return_token_ids else UNSET,
        )
        return event(self._chunk([choice]))

    def usage(self, usage: Usage) -> Completion | None:
        return self._chunk([], usage) if self._call.include_usage else None

    def _chunk(self, choices: list[TextChoice], usage: Usage | None = None) -> Completion:
        call = self._call
        return Completion(
            id=call.id,
            created=call.created,
            model=call.model,
            choices=choices,
            usage=usage if call.include_usage else UNSET,
        )


FACE = Face(answer=_answer, writer=_Writer)
