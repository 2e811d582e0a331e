"""/v1/responses: the answer as a list of items, whole or as a stream of events that build it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from jaxcb.parsing import AnswerParser, CallStart, Event, Reasoning, Text
from jaxcb.request import FinishReason, RequestOutput
from jaxcb.serve.call import Call, Face, new_id
from jaxcb.serve.chat_answer import reasoning_tokens
from jaxcb.serve.errors import ApiError
from jaxcb.serve.logprobs import TokenLogprob
from jaxcb.serve.message_logprobs import MessageLogprobs, MessageToken
from jaxcb.serve.responses import Usage
from jaxcb.serve.responses_fields import Asked
from jaxcb.serve.sse import Writer, event


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str = ""


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: str = "assistant"
    status: str = "in_progress"
    content: list[OutputText] = []


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: str = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningText] = []


class CallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: str = "in_progress"


Item = MessageItem | ReasoningItem | CallItem


class InputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(msgspec.Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: str


class ResponseBody(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. Fields without a default repeat the body, or the defaults that hold for it."""

    id: str
    object: str = "response"
    created_at: int
    status: str
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[Item]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, str | None]
    background: bool = False
    store: bool = False
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]


class _Builder:
    """Builds the items of an answer, and says each change as an event (name, fields)."""

    def __init__(self, call: Call):
        self._call = call
        self.items: list[Item] = []
        self._open = False
        """The last item is not complete."""
        self._messages = -1
        """Number of the last message, from 0."""
        self._tokens: list[MessageToken] = []
        """Of messages, with their log-probabilities, that were not said yet."""

    def know(self, tokens: Sequence[MessageToken]) -> None:
        """Log-probabilities of tokens, to be said beside their text."""
        self._tokens += tokens

    def take(self, parts: Sequence[Event]) -> list[tuple[str, dict[str, Any]]]:
        return [said for part in parts for said in self._take(part)]

    def close(self, status: str = "completed") -> list[tuple[str, dict[str, Any]]]:
        """End the last item."""
        if not self._open:
            return []
        item, self._open = self.items[-1], False
        item.status = status
        said = []
        if isinstance(item, CallItem):
            said.append(self._said("response.function_call_arguments.done", arguments=item.arguments, name=item.name))
        else:
            part = item.content[0]
            name = "output_text" if isinstance(part, OutputText) else "reasoning_text"
            more: dict[str, Any] = {}
            if isinstance(part, OutputText):
                part.logprobs += self._logprobs()
                more["logprobs"] = part.logprobs
            said.append(self._said(f"response.{name}.done", content_index=0, text=part.text, **more))
            said.append(self._said("response.content_part.done", content_index=0, part=part))
        return [*said, ("response.output_item.done", {"output_index": len(self.items) - 1, "item": item})]

    @property
    def reasoning(self) -> str:
        return "".join(item.content[0].text for item in self.items if isinstance(item, ReasoningItem))

    def _take(self, part: Event) -> list[tuple[str, dict[str, Any]]]:
        if isinstance(part, CallStart):
            return self._begin(CallItem(id=new_id("fc_"), call_id=self._call.new_call_id(), name=part.name))
        if isinstance(part, Text):
            return self._add(MessageItem, OutputText, part.text)
        if isinstance(part, Reasoning):
            return self._add(ReasoningItem, ReasoningText, part.text)
        item = self.items[-1]
        assert isinstance(item, CallItem)  # arguments follow the start of their call
        item.arguments += part.text
        return [self._said("response.function_call_arguments.delta", delta=part.text)]

    def _add(self, kind: type[Any], content: type[Any], text: str) -> list[tuple[str, dict[str, Any]]]:
        said = []
        if not self._open or not isinstance(self.items[-1], kind):
            said += self._begin(kind(id=new_id("msg_" if kind is MessageItem else "rs_")))
            part = content()
            said.append(self._said("response.content_part.added", content_index=0, part=content()))
            self._messages += content is OutputText
            self.items[-1].content = [part]  # type: ignore[union-attr]  # a message or reasoning, not a call
        part = self.items[-1].content[0]  # type: ignore[union-attr]  # as above
        part.text += text
        name = "reasoning_text" if content is ReasoningText else "output_text"
        more: dict[str, Any] = {}
        if content is OutputText:
            more["logprobs"] = self._logprobs()
            part.logprobs += more["logprobs"]  # type: ignore[union-attr]  # as above
        return [*said, self._said(f"response.{name}.delta", content_index=0, delta=text, **more)]

    def _logprobs(self) -> list[TokenLogprob]:
        """Those of the message under way that were not said yet."""
        own = [token.logprob for token in self._tokens if token.message <= self._messages]
        del self._tokens[: len(own)]
        return own

    def _begin(self, item: Item) -> list[tuple[str, dict[str, Any]]]:
        said = self.close()
        self.items.append(item)
        self._open = True
        fresh = msgspec.structs.replace(item)  # as it is now: events are written down later
        return [*said, ("response.output_item.added", {"output_index": len(self.items) - 1, "item": fresh})]

    def _said(self, event_name: str, /, **fields: Any) -> tuple[str, dict[str, Any]]:
        return event_name, {"item_id": self.items[-1].id, "output_index": len(self.items) - 1, **fields}


def _answer(call: Call, outputs: Sequence[RequestOutput], usage: Usage) -> ResponseBody:
    builder = _Builder(call)
    reader, parser = MessageLogprobs(call), AnswerParser(call.reading)
    builder.know([*reader.take(outputs[0].logprobs), *reader.finish()])
    builder.take([*parser.feed(outputs[0].text), *parser.finish()])
    builder.close(_status(outputs[0]))
    return _body(call, builder, _status(outputs[0]), usage)


def _status(output: RequestOutput) -> str:
    return "incomplete" if output.finish_reason is FinishReason.LENGTH else "completed"


def _body(
    call: Call, builder: _Builder, status: str, usage: Usage | None = None, error: ResponseFailure | None = None
) -> ResponseBody:
    asked: Asked = call.asked
    fields, params = asked.fields, call.prompts[0].sampling
    return ResponseBody(
        id=call.id,
        created_at=call.created,
        status=status,
        error=error,
        incomplete_details=IncompleteDetails("max_output_tokens") if status == "incomplete" else None,
        instructions=fields.instructions,
        max_output_tokens=fields.max_output_tokens,
        model=call.model,
        output=list(builder.items),
        parallel_tool_calls=fields.parallel_tool_calls is not False,
        reasoning={"effort": None if fields.reasoning is None else fields.reasoning.effort, "summary": None},
        temperature=params.temperature,
        text={"format": (fields.text and fields.text.format) or {"type": "text"}},
        tool_choice=fields.tool_choice or "auto",
        tools=[{**msgspec.to_builtins(tool), "strict": bool(tool.strict)} for tool in fields.tools or ()],
        top_logprobs=params.logprobs or 0,
        top_p=params.top_p,
        usage=None if usage is None else _usage(call, usage, builder),
        user=asked.ignored.user,
        metadata=asked.ignored.metadata or {},
    )


def _usage(call: Call, usage: Usage, builder: _Builder) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens(call, [builder.reasoning])),
        total_tokens=usage.total_tokens,
    )


class _Writer(Writer):
    """Events have names and numbers; the last one holds the whole answer, and no ``[DONE]`` follows."""

    def __init__(self, call: Call):
        self._call = call
        self._parser = AnswerParser(call.reading)
        self._reader = MessageLogprobs(call)
        self._builder = _Builder(call)
        self._number = 0
        self._status = "completed"

    def begin(self) -> bytes:
        body = _body(self._call, self._builder, "in_progress")
        return self._event("response.created", response=body) + self._event("response.in_progress", response=body)

    def chunk(self, index: int, output: RequestOutput, first: bool) -> bytes:
        self._builder.know(self._reader.take(output.new_logprobs))
        said = self._builder.take(self._parser.feed(output.new_text))
        if output.finished:
            self._builder.know(self._reader.finish())
            self._status = _status(output)
            said += self._builder.take(self._parser.finish())
            said += self._builder.close(self._status)
        return b"".join(self._event(name, **fields) for name, fields in said)

    def end(self, usage: Usage) -> bytes:
        body = _body(self._call, self._builder, self._status, usage)
        return self._event(f"response.{self._status}", response=body)

    def fail(self, error: ApiError) -> bytes:
        failure = ResponseFailure(error.code or "server_error", str(error))
        self._builder.close("incomplete")
        return self._event("response.failed", response=_body(self._call, self._builder, "failed", error=failure))

    def _event(self, name: str, /, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": name, "sequence_number": self._number - 1, **fields}, name)


FACE = Face(answer=_answer, writer=_Writer)
