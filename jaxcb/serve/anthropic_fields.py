"""POST /v1/messages and /v1/messages/count_tokens, Anthropic's API: the fields, and the conversation they describe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from jaxcb.errors import RequestError
from jaxcb.serve.call import Call
from jaxcb.serve.conversation import Conversation
from jaxcb.serve.fields import convert, decode_object, refuse_unsupported, take
from jaxcb.serve.prepare import conversation_call
from jaxcb.serve.requests import SamplingFields, SchedulingFields, TemplateFields, check_counted
from jaxcb.serve.tools import FunctionTool, ToolChoice, check_depth
from jaxcb.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from jaxcb.serve.service import Service

MESSAGES_UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    "container": (),
    "mcp_servers": ([],),
    "context_management": (),
    "inference_geo": (),
    "speed": ("standard",),
    "service_tier": ("auto", "standard_only"),
    "n": (1,),
    "stop": (),
}
"""As in :data:`jaxcb.serve.requests.UNSUPPORTED`."""


class Block(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A block of a message, by its ``type`` with the fields of that type. ``cache_control`` is a hint: prefixes are
    cached anyhow. So is ``caller``, which comes back from answers."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    citations: list[Any] | None = None
    cache_control: dict[str, Any] | None = None
    caller: Any = None

    def __post_init__(self) -> None:
        needed = _NEEDED.get(self.type)
        if needed is None:
            raise ValueError(f"blocks of the type {self.type[:40]!r} are not supported: {', '.join(_NEEDED)} are")
        for name in needed:
            if getattr(self, name) is None:
                raise ValueError(f"a block of the type {self.type} needs the field {name}")


_NEEDED = {
    "text": ("text",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
    "thinking": ("thinking",),
}


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: str
    content: str | list[Block]

    def __post_init__(self) -> None:
        if self.role not in ("user", "assistant"):
            raise ValueError(f"role must be user or assistant, got {self.role[:40]!r}")


class AnthropicTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.type not in (None, "custom"):
            raise ValueError(f"tools of the server ({self.type[:40]}) are not supported: describe one of your own")
        if self.input_schema is None:
            raise ValueError("a tool needs the field input_schema")
        self.function()

    def function(self) -> FunctionTool:
        return FunctionTool(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )


class AnthropicToolChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def __post_init__(self) -> None:
        if self.type not in _MODES:
            raise ValueError(f"type must be {', '.join(_MODES)}, got {self.type[:40]!r}")
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name belongs to the type tool, which needs it")


_MODES = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}


class Thinking(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: str
    budget_tokens: int | None = None
    display: str | None = None

    def __post_init__(self) -> None:
        if self.type not in ("enabled", "adaptive", "disabled"):
            raise ValueError(f"type must be enabled, adaptive or disabled, got {self.type[:40]!r}")
        if self.display not in (None, "summarized"):
            raise ValueError("display is not supported: leave it out")


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A JSON schema that the answer's text follows."""

    type: str
    schema: dict[str, Any]

    def __post_init__(self) -> None:
        if self.type != "json_schema":
            raise ValueError(f"type must be json_schema, got {self.type[:40]!r}")


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    effort: str | None = None
    format: OutputFormat | None = None


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    user_id: str | None = None


class PromptFields(msgspec.Struct, frozen=True, kw_only=True):
    """What the prompt is made of: all that counting its tokens needs."""

    messages: list[Message]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    cache_control: dict[str, Any] | None = None


class CountFields(PromptFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens."""


class MessagesFields(PromptFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages, without the fields that other endpoints have too."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None


def read(body: bytes, service: Service) -> Call:
    """Check a body and build its prompt. Slow for long prompts: call it off the event loop.

    Raises:
        RequestError, ApiError: what is wrong, naming the field.
    """
    fields = decode_object(body)
    refuse_unsupported(fields, MESSAGES_UNSUPPORTED)
    own = {name: fields[name] for name in ("max_tokens",) if name in fields}
    sampling = take(fields, SamplingFields)
    scheduling = take(fields, SchedulingFields).given(service.engine.config.policy)
    given = convert({**fields, **own}, MessagesFields)
    model = service.check_model(given.model)
    if given.stop_sequences is not None:
        sampling = msgspec.structs.replace(sampling, stop=given.stop_sequences)
    config = given.output_config or OutputConfig()
    language = config.format or given.output_format
    return conversation_call(
        conversation_of(given, service).with_effort(config.effort, service),
        sampling,
        service,
        prefix="msg_",
        model=model,
        stream=bool(given.stream),
        scheduling=scheduling,
        field_names={"prompt": "messages", "stop": "stop_sequences"},
        asked=given,
        wanted=None if language is None else StructuredOutputs(json=language.schema),
    )


def count(body: bytes, service: Service) -> int:
    """Tokens of the prompt that a body asks about.

    Raises:
        RequestError, ApiError: what is wrong, naming the field.
    """
    fields = decode_object(body)
    refuse_unsupported(fields, {name: MESSAGES_UNSUPPORTED[name] for name in ("mcp_servers", "context_management")})
    given = convert(fields, CountFields)
    service.check_model(given.model)
    text = conversation_of(given, service).render(service)
    check_counted("messages", text)
    return len(service.engine.tokenizer.encode_chat(text))


def conversation_of(given: PromptFields, service: Service) -> Conversation:
    """A last message of the assistant is the beginning of the answer.

    Raises:
        RequestError: a message is malformed, or the model can't do what ``thinking`` asks for.
    """
    if not given.messages:
        raise RequestError("messages must hold at least one message", param="messages")
    messages = [] if given.system is None else [{"role": "system", "content": _text(given.system, "system")}]
    for index, message in enumerate(given.messages):
        messages += _plain(message, f"messages[{index}]")
    continued = given.messages[-1].role == "assistant"
    if continued and messages[-1].get("tool_calls"):
        raise RequestError("the last message calls a tool: send its result", param="messages")
    wanted = given.tool_choice or AnthropicToolChoice(type="auto")
    choice = ToolChoice.of(
        [tool.function() for tool in given.tools or ()],
        _MODES[wanted.type],
        wanted.name,
        parallel=not wanted.disable_parallel_tool_use,
    )
    template = TemplateFields(continue_final_message=continued, chat_template_kwargs=_thinking(given.thinking, service))
    return Conversation(messages=messages, choice=choice, **template.given())


def _thinking(thinking: Thinking | None, service: Service) -> dict[str, Any]:
    """Settings of the template that make the model think, or not."""
    if thinking is None:
        return {}
    reads = service.engine.tokenizer.reads
    settings: dict[str, Any] = {}
    wanted = thinking.type != "disabled"
    if switch := next((name for name in ("enable_thinking", "thinking") if reads(name)), None):
        settings[switch] = wanted
    elif wanted != (service.reasoning is not None):
        what = "does not think" if wanted else "can't be kept from thinking"
        raise RequestError(f"thinking is not supported: this model {what}; leave it out", param="thinking")
    if thinking.budget_tokens is not None:
        if not reads("thinking_budget"):
            raise RequestError(
                'thinking.budget_tokens is not supported by this model\'s template: send {"type": "adaptive"}',
                param="thinking.budget_tokens",
            )
        settings["thinking_budget"] = thinking.budget_tokens
    return settings


def _use(block: Block, where: str) -> dict[str, Any]:
    """A call of a tool, as chat messages have it."""
    try:
        check_depth(block.input)
    except ValueError as error:
        raise RequestError(f"{where}.input: {error}", param=f"{where}.input") from error
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}


def _plain(message: Message, where: str) -> list[dict[str, Any]]:
    """The chat messages that one of Anthropic's stands for: results of tools are messages of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    allowed = ("text", "tool_result") if message.role == "user" else ("text", "tool_use", "thinking")
    for index, block in enumerate(message.content):
        if block.type not in allowed:
            param = f"{where}.content[{index}]"
            raise RequestError(
                f"{param}: a message of the role {message.role} holds {' and '.join(allowed)}, got {block.type}",
                param=param,
            )
    results = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block, f"{where}.content[{index}]")}
        for index, block in enumerate(message.content)
        if block.type == "tool_result"
    ]
    texts = [block.text for block in message.content if block.type == "text" and block.text is not None]
    if results and not texts:
        return results
    plain: dict[str, Any] = {"role": message.role, "content": "\n".join(texts)}
    if thoughts := [block.thinking for block in message.content if block.thinking is not None]:
        plain["reasoning_content"] = "\n".join(thoughts)
    calls = [
        _use(block, f"{where}.content[{index}]")
        for index, block in enumerate(message.content)
        if block.type == "tool_use"
    ]
    if calls:
        plain["tool_calls"] = calls
    return [*results, plain]


def _result(block: Block, where: str) -> str:
    text = "" if block.content is None else _text(block.content, f"{where}.content")
    return f"Error: {text}" if block.is_error else text


def _text(content: str | Sequence[Block], where: str) -> str:
    if isinstance(content, str):
        return content
    for index, block in enumerate(content):
        if block.type != "text":
            param = f"{where}[{index}]"
            raise RequestError(f"{param}: only text is supported here, got {block.type}", param=param)
    return "\n".join(block.text or "" for block in content)
