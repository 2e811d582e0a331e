"""POST /v1/responses: the fields, and the conversation that they describe. Nothing is stored between requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from jaxcb.errors import RequestError
from jaxcb.serve.call import Call
from jaxcb.serve.conversation import Conversation
from jaxcb.serve.fields import convert, decode_object, only_functions, refuse_unsupported, take
from jaxcb.serve.prepare import conversation_call
from jaxcb.serve.requests import IgnoredFields, LogprobCount, SamplingFields, SchedulingFields, TemplateFields
from jaxcb.serve.structured import of_response_format
from jaxcb.serve.tools import FunctionCall, FunctionTool, ToolCall, ToolChoice
from jaxcb.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from jaxcb.serve.service import Service

RESPONSES_UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    "previous_response_id": (),
    "conversation": (),
    "store": (False,),
    "background": (False,),
    "prompt": (),
    "max_tool_calls": (),
    "truncation": ("disabled",),
    "service_tier": ("auto", "default"),
    "n": (1,),
    "max_tokens": (),
    "moderation": (),
    "context_management": ([],),
    "input_transformations": ([],),
}
"""As in :data:`jaxcb.serve.requests.UNSUPPORTED`. State is refused: the client sends the whole conversation."""
LOGPROBS = "message.output_text.logprobs"
_TEXT_PARTS = ("input_text", "output_text", "text")


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a message. Other fields come with other types, and with answers that are sent back."""

    type: str
    text: str | None = None

    def __post_init__(self) -> None:
        if self.type not in _TEXT_PARTS:
            raise ValueError(f"only parts of the types {', '.join(_TEXT_PARTS)} are supported, got {self.type[:40]!r}")
        if self.text is None:
            raise ValueError(f"a part of the type {self.type} needs the field text")


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """A message, a call, its result, or the reasoning of an answer; of each the fields that belong to it."""

    type: str = "message"
    role: str | None = None
    content: str | list[Any] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None

    def __post_init__(self) -> None:
        needed = _NEEDED.get(self.type)
        if needed is None:
            raise ValueError(f"items of the type {self.type[:40]!r} are not supported: {', '.join(_NEEDED)} are")
        for name in needed:
            if getattr(self, name) is None:
                raise ValueError(f"an item of the type {self.type} needs the field {name}")
        if self.type == "message" and self.role not in ("user", "assistant", "system", "developer"):
            raise ValueError(f"role must be user, assistant, system or developer, got {str(self.role)[:40]!r}")


_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}


class FlatTool(FunctionTool, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool as this endpoint writes it, without the inner object."""

    type: str


class NamedFlatTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: str
    name: str | None = None

    def __post_init__(self) -> None:
        if self.type != "function" or self.name is None:
            raise ValueError('must be "none", "auto", "required" or {"type": "function", "name": ...}')


class TextConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None

    def __post_init__(self) -> None:
        if self.verbosity not in (None, "medium"):
            raise ValueError('verbosity is not supported: leave it out or send "medium"')


class ReasoningConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The reasoning itself is in the answer; there are no summaries."""

    effort: str | None = None
    summary: str | None = None

    def __post_init__(self) -> None:
        if self.summary not in (None, "auto"):
            raise ValueError('summary is not supported: leave it out or send "auto"')


class ResponseStreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None

    def __post_init__(self) -> None:
        if self.include_obfuscation:
            raise ValueError("include_obfuscation is not supported: leave it out or send false")


class ResponsesFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses, without the fields that other endpoints have too."""

    input: str | list[Item]
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    tools: list[FlatTool] | None = None
    tool_choice: str | NamedFlatTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    top_logprobs: LogprobCount | None = None

    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens come beside each of a message; None: no log-probabilities are wanted.

        Raises:
            RequestError: ``include`` asks for something else, or ``top_logprobs`` for what is not included.
        """
        for name in self.include or ():
            if name != LOGPROBS:
                raise RequestError(
                    f"include may hold {LOGPROBS!r} alone, got {name[:80]!r} (reasoning comes without it)",
                    param="include",
                )
        if self.include:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise RequestError(f"top_logprobs needs include to hold {LOGPROBS!r}", param="top_logprobs")
        return None


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What the answer repeats of the body."""

    fields: ResponsesFields
    sampling: SamplingFields
    ignored: IgnoredFields


def read(body: bytes, service: Service) -> Call:
    """Check a body and build its prompt. Slow for long prompts: call it off the event loop.

    Raises:
        RequestError, ApiError: what is wrong, naming the field.
    """
    fields = decode_object(body)
    refuse_unsupported(fields, RESPONSES_UNSUPPORTED)
    sampling = take(fields, SamplingFields)
    scheduling = take(fields, SchedulingFields).given(service.engine.config.policy)
    template = take(fields, TemplateFields)
    ignored = take(fields, IgnoredFields)
    only_functions(fields)
    given = convert(fields, ResponsesFields)
    model = service.check_model(given.model)
    if given.stream_options is not None and not given.stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    if given.max_output_tokens is not None:
        sampling = msgspec.structs.replace(sampling, max_tokens=given.max_output_tokens)
    logprobs = given.num_logprobs()
    conversation = Conversation(messages=messages_of(given), choice=_choice(given), **template.given())
    if given.reasoning is not None:
        conversation = conversation.with_effort(given.reasoning.effort, service)
    return conversation_call(
        conversation,
        sampling,
        service,
        prefix="resp_",
        model=model,
        stream=bool(given.stream),
        scheduling=scheduling,
        field_names={"prompt": "input", "messages": "input", "max_tokens": "max_output_tokens"},
        asked=Asked(fields=given, sampling=sampling, ignored=ignored),
        wanted=_language(given.text),
        logprobs=logprobs,
    )


def messages_of(given: ResponsesFields) -> list[dict[str, Any]]:
    """The conversation as chat messages: calls belong to the assistant's message before them.

    Raises:
        RequestError: there is none, or an item is malformed.
    """
    messages: list[dict[str, Any]] = []
    if given.instructions is not None:
        messages.append({"role": "system", "content": given.instructions})
    if isinstance(given.input, str):
        return [*messages, {"role": "user", "content": given.input}]
    if not given.input:
        raise RequestError("input must hold at least one item", param="input")
    for index, item in enumerate(given.input):
        where = f"input[{index}]"
        if item.type == "message":
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": _text(item.content, f"{where}.content")})
        elif item.type == "reasoning":
            _assistant(messages)["reasoning_content"] = _reasoning(item, where)
        elif item.type == "function_call":
            _assistant(messages).setdefault("tool_calls", []).append(_call(item, where))
        else:
            content = _text(item.output, f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
    return _joined(messages)


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message that the last items belong to: a new one, unless the last message is one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One turn of the assistant comes as several items: reasoning, text, calls."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        last = joined[-1] if joined else None
        if last and last["role"] == message["role"] == "assistant" and not last["content"]:
            joined[-1] = {**last, **message}
        else:
            joined.append(message)
    return joined


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    parts = [convert_at(part, Part, f"{where}[{index}]") for index, part in enumerate(content)]
    return "\n".join(part.text or "" for part in parts)


def convert_at(value: Any, schema: type[Any], where: str) -> Any:
    """As :func:`jaxcb.serve.fields.convert`, for a value at ``where`` in the body.

    Raises:
        RequestError: it doesn't fit; ``.param`` names its place.
    """
    if isinstance(value, msgspec.Struct):
        return value
    try:
        return convert(value, schema)
    except RequestError as error:
        param = where if error.param is None else f"{where}.{error.param}"
        raise RequestError(f"{where}: {error}", param=param) from error


def _reasoning(item: Item, where: str) -> str | None:
    parts = item.content if isinstance(item.content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    if any(not isinstance(text, str) for text in texts) or len(texts) != len(parts):
        raise RequestError(f"{where}.content must hold parts with text", param=f"{where}.content")
    return "\n".join(text for text in texts if isinstance(text, str)) or None


def _call(item: Item, where: str) -> dict[str, Any]:
    assert item.call_id is not None and item.name is not None and item.arguments is not None  # the schema says so
    try:
        function = FunctionCall(name=item.name, arguments=item.arguments)
        return ToolCall(id=item.call_id, function=function).plain()
    except ValueError as error:
        param = f"{where}.arguments"
        raise RequestError(f"{param} must be a JSON object: {error}", param=param) from error


def _choice(given: ResponsesFields) -> ToolChoice:
    tools = given.tools or []
    wanted = given.tool_choice
    if isinstance(wanted, NamedFlatTool):
        return ToolChoice.of(tools, "named", wanted.name, parallel=given.parallel_tool_calls)
    if wanted not in (None, "none", "auto", "required"):
        raise RequestError(
            f'tool_choice must be "none", "auto", "required" or name a function, got {str(wanted)[:40]!r}',
            param="tool_choice",
        )
    return ToolChoice.of(tools, wanted or "auto", None, parallel=given.parallel_tool_calls)


def _language(text: TextConfig | None) -> StructuredOutputs | None:
    """What ``text.format`` holds the answer to. Its schema stands one level higher than in ``response_format``."""
    if text is None or text.format is None:
        return None
    wanted = dict(text.format)
    if wanted.get("type") == "json_schema":
        inner = {name: value for name, value in wanted.items() if name != "type"}
        wanted = {"type": "json_schema", "json_schema": inner}
    try:
        return of_response_format(wanted, "text.format")
    except RequestError as error:
        flat = str(error).replace("text.format.json_schema", "text.format")
        raise RequestError(flat, param=(error.param or "").replace("text.format.json_schema", "text.format")) from error
