"""/v1/chat/completions: what it answers, whole or in chunks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from jaxcb.parsing import AnswerParser, CallArguments, CallStart, Event, Reasoning, Text
from jaxcb.request import FinishReason, RequestOutput
from jaxcb.serve.call import Call, Face
from jaxcb.serve.logprobs import chat_logprobs, prompt_logprobs
from jaxcb.serve.responses import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    CompletionTokensDetails,
    Delta,
    FunctionDelta,
    ToolCallDelta,
    Usage,
)
from jaxcb.serve.sse import Writer, event
from jaxcb.serve.tools import FunctionCall, ToolCall


def _answer(call: Call, outputs: Sequence[RequestOutput], usage: Usage) -> ChatCompletion:
    answers = [call.reading.parse(output.text) for output in outputs]
    return ChatCompletion(
        id=call.id,
        created=call.created,
        model=call.model,
        choices=[
            ChatChoice(
                index=index,
                message=AnswerMessage(
                    content=None if answer.calls and not answer.text else answer.text,
                    reasoning_content=answer.reasoning if answer.reasoning and call.include_reasoning else UNSET,
                    tool_calls=[
                        ToolCall(id=call.new_call_id(), function=FunctionCall(name=one.name, arguments=one.arguments))
                        for one in answer.calls
                    ]
                    or UNSET,
                ),
                finish_reason=finish_reason(output, bool(answer.calls)),
                stop_reason=output.stop_reason,
                logprobs=chat_logprobs(output.logprobs, call.tokenizer),
                token_ids=list(output.token_ids) if call.return_token_ids else UNSET,
            )
            for index, (output, answer) in enumerate(zip(outputs, answers, strict=True))
        ],
        usage=usage_of(call, usage, [answer.reasoning for answer in answers]),
        prompt_token_ids=list(call.prompts[0].token_ids) if call.return_token_ids else UNSET,
        prompt_logprobs=UNSET
        if call.num_prompt_logprobs is None
        else prompt_logprobs(outputs[0].prompt_logprobs, call.tokenizer),
    )


def finish_reason(output: RequestOutput, has_calls: bool) -> str | None:
    """A natural end behind calls is "tool_calls"."""
    natural = output.finish_reason is FinishReason.STOP and output.stop_reason is None
    return "tool_calls" if has_calls and natural else output.finish_reason


def usage_of(call: Call, usage: Usage, reasoning: Sequence[str]) -> Usage:
    """With the tokens of the reasoning, where the model reasons."""
    if call.reading.reasoning is None:
        return usage
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        prompt_tokens_details=usage.prompt_tokens_details,
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens(call, reasoning)),
    )


def reasoning_tokens(call: Call, reasoning: Sequence[str]) -> int:
    """Counted by making tokens of its text again."""
    return sum(len(call.tokenizer.encode(text, add_special_tokens=False)) for text in reasoning if text)


class _Writer(Writer):
    """The role comes alone and first; an output that added nothing and ends nothing is not worth a chunk."""

    def __init__(self, call: Call):
        self._call = call
        self._parsers: dict[int, AnswerParser] = {}
        self._called: set[int] = set()
        """Choices with a call of a tool."""
        self._reasoning: dict[int, str] = {}

    def chunk(self, index: int, output: RequestOutput, first: bool) -> bytes:
        body = b""
        if first:
            self._parsers[index] = AnswerParser(self._call.reading)
            body += event(self._first(index))
        parser = self._parsers[index]
        parts = parser.feed(output.new_text)
        if output.finished:
            parts += parser.finish()
        deltas = [delta for part in parts if (delta := self._delta(index, part)) is not None]
        logprobs, ids = output.new_logprobs, list(output.new_token_ids) if self._call.return_token_ids else None
        if not deltas and (output.finished or logprobs or ids):
            deltas = [Delta()]
        for delta in deltas:
            last = output.finished and delta is deltas[-1]
            choice = ChatChunkChoice(
                index=index,
                delta=delta,
                finish_reason=finish_reason(output, index in self._called) if last else None,
                stop_reason=output.stop_reason if last else UNSET,
                logprobs=chat_logprobs(logprobs, self._call.tokenizer),
                token_ids=UNSET if ids is None else ids,
            )
            logprobs = ids = None
            body += event(self._chunk([choice]))
        return body

    def usage(self, usage: Usage) -> ChatChunk | None:
        if not self._call.include_usage:
            return None
        return self._chunk([], usage_of(self._call, usage, list(self._reasoning.values())))

    def _first(self, index: int) -> ChatChunk:
        chunk = self._chunk([ChatChunkChoice(index=index, delta=Delta(role="assistant", content=""))])
        if not self._call.return_token_ids:
            return chunk
        return msgspec.structs.replace(chunk, prompt_token_ids=list(self._call.prompts[0].token_ids))

    def _delta(self, index: int, part: Event) -> Delta | None:
        if isinstance(part, Text):
            return Delta(content=part.text)
        if isinstance(part, Reasoning):
            self._reasoning[index] = self._reasoning.get(index, "") + part.text
            return Delta(reasoning_content=part.text) if self._call.include_reasoning else None
        if isinstance(part, CallStart):
            self._called.add(index)
            function = FunctionDelta(name=part.name, arguments="")
            begun = ToolCallDelta(index=part.index, id=self._call.new_call_id(), type="function", function=function)
            return Delta(tool_calls=[begun])
        assert isinstance(part, CallArguments)
        return Delta(tool_calls=[ToolCallDelta(index=part.index, function=FunctionDelta(arguments=part.text))])

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatChunk:
        call = self._call
        return ChatChunk(
            id=call.id,
            created=call.created,
            model=call.model,
            choices=choices,
            usage=usage if call.include_usage else UNSET,
        )


FACE = Face(answer=_answer, writer=_Writer)
