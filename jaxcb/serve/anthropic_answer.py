"""/v1/messages: the answer as a list of blocks, whole or as a stream of Anthropic's events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from jaxcb.parsing import AnswerParser, CallArguments, CallStart, Event, Reasoning, Text
from jaxcb.request import FinishReason, RequestOutput
from jaxcb.serve.call import Call, Face
from jaxcb.serve.errors import ApiError, anthropic_error
from jaxcb.serve.responses import Usage
from jaxcb.serve.sse import Writer, event


class TextBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    text: str
    citations: None = None


class ThinkingBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """``input_tokens`` are those that the prefix cache did not have."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0
    output_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> MessageUsage:
        cached = usage.prompt_tokens_details.cached_tokens
        return cls(
            input_tokens=usage.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
        )


class MessageBody(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(msgspec.Struct, frozen=True):
    input_tokens: int


def _answer(call: Call, outputs: Sequence[RequestOutput], usage: Usage) -> MessageBody:
    [output] = outputs
    answer = call.reading.parse(output.text)
    content: list[TextBlock | ThinkingBlock | ToolUseBlock] = []
    if answer.reasoning:
        content.append(ThinkingBlock(thinking=answer.reasoning))
    if answer.text:
        content.append(TextBlock(text=answer.text))
    for one in answer.calls:
        content.append(ToolUseBlock(id=call.new_call_id(), name=one.name, input=_input(one.arguments)))
    reason, sequence = _stop(output, bool(answer.calls))
    return MessageBody(
        id=call.id,
        model=call.model,
        content=content,
        stop_reason=reason,
        stop_sequence=sequence,
        usage=MessageUsage.of(usage),
    )


def _input(arguments: str) -> dict[str, Any]:
    """The arguments as an object; empty if the model did not come to their end."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {}


def _stop(output: RequestOutput, has_calls: bool) -> tuple[str, str | None]:
    """(stop_reason, stop_sequence)."""
    if output.finish_reason is FinishReason.LENGTH:
        return "max_tokens", None
    if isinstance(output.stop_reason, str):
        return "stop_sequence", output.stop_reason
    return ("tool_use" if has_calls else "end_turn"), None


class _Writer(Writer):
    """Every event has its type as its name. Blocks are numbered, and one ends before the next begins."""

    keep_alive = event({"type": "ping"}, "ping")

    def __init__(self, call: Call):
        self._call = call
        self._parser = AnswerParser(call.reading)
        self._num_blocks = 0
        self._open: type[Any] | None = None
        """Kind of the events of the block under way."""
        self._called = False
        self._ending: tuple[str, str | None] = ("end_turn", None)

    def begin(self) -> bytes:
        call = self._call
        usage = MessageUsage(
            input_tokens=len(call.prompts[0].token_ids), cache_read_input_tokens=0, output_tokens=0
        )  # what of it was cached is known at the end
        body = MessageBody(id=call.id, model=call.model, content=[], stop_reason=None, stop_sequence=None, usage=usage)
        return _event("message_start", message=body) + self.keep_alive

    def chunk(self, index: int, output: RequestOutput, first: bool) -> bytes:
        parts = self._parser.feed(output.new_text)
        if output.finished:
            parts += self._parser.finish()
        body = b"".join(map(self._part, parts))
        if output.finished:
            self._ending = _stop(output, self._called)
            body += self._close()
        return body

    def end(self, usage: Usage) -> bytes:
        reason, sequence = self._ending
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return _event("message_delta", delta=delta, usage=MessageUsage.of(usage)) + _event("message_stop")

    def fail(self, error: ApiError) -> bytes:
        return event(anthropic_error(error), "error")

    def _part(self, part: Event) -> bytes:
        if isinstance(part, CallStart):
            self._called = True
            block = ToolUseBlock(id=self._call.new_call_id(), name=part.name, input={})
            return self._begin(CallArguments, block)
        if isinstance(part, Text):
            kind, empty, delta = Text, TextBlock(text=""), {"type": "text_delta", "text": part.text}
        elif isinstance(part, Reasoning):
            kind, empty = Reasoning, ThinkingBlock(thinking="")  # type: ignore[assignment]  # one of each kind
            delta = {"type": "thinking_delta", "thinking": part.text}
        else:
            return self._delta({"type": "input_json_delta", "partial_json": part.text})
        begun = b"" if self._open is kind else self._begin(kind, empty)
        return begun + self._delta(delta)

    def _begin(self, kind: type[Any], block: msgspec.Struct) -> bytes:
        closed = self._close()
        self._open = kind
        self._num_blocks += 1
        return closed + _event("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _event("content_block_stop", index=self._num_blocks - 1)


def _event(name: str, /, **fields: Any) -> bytes:
    return event({"type": name, **fields}, name)


FACE = Face(answer=_answer, writer=_Writer)
