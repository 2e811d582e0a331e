"""Tools over HTTP: what a body says of them, in OpenAI's words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from jaxcb.errors import RequestError

MAX_TOOLS = 128
MAX_DEPTH = 200
"""Levels of a tool's schema, and of a call's arguments."""
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


def check_depth(value: Any) -> None:
    """Raise ValueError if JSON is nested so deeply that what reads it later would run out of stack."""
    level, depth = [value], 0
    while level:
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level, depth = [item for items in inner for item in items], depth + 1


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function that can be called; ``parameters`` is the JSON schema of its arguments, which ``strict`` holds them
    to."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"name must be up to 64 letters, digits, _, - and ., got {self.name[:80]!r}")
        check_depth(self.parameters)

    def plain(self) -> dict[str, Any]:
        """What templates take."""
        fields = {"name": self.name, "description": self.description, "parameters": self.parameters}
        function = {name: value for name, value in fields.items() if value is not None}
        return {"type": "function", "function": function}


class Tool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: str
    function: FunctionTool


class NamedFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: str
    function: NamedFunction | None = None

    def __post_init__(self) -> None:
        if self.type != "function" or self.function is None:
            raise ValueError('must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}')


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call in a message, or in an answer. ``index`` comes from clients that send streamed calls back."""

    id: str
    type: str = "function"
    function: FunctionCall
    index: int | msgspec.UnsetType | None = msgspec.UNSET

    def __post_init__(self) -> None:
        if self.type != "function":
            raise ValueError(f'only calls of type "function" are supported, got {self.type[:40]!r}')

    def plain(self) -> dict[str, Any]:
        """What templates take: the arguments as an object.

        Raises:
            ValueError: they are none.
        """
        try:
            arguments = msgspec.json.decode(self.function.arguments or "{}", type=dict[str, Any])
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        check_depth(arguments)
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class ToolFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of /v1/chat/completions."""

    tools: list[Tool] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    def choice(self) -> ToolChoice:
        """These fields, checked.

        Raises:
            RequestError: they make no sense together; ``.param`` names the field.
        """
        functions = [tool.function for tool in self.tools or ()]
        wanted = self.tool_choice
        if isinstance(wanted, NamedTool):
            assert wanted.function is not None  # or the schema had refused it
            return ToolChoice.of(functions, "named", wanted.function.name, parallel=self.parallel_tool_calls)
        if wanted not in (None, "none", "auto", "required"):
            raise RequestError(
                f'tool_choice must be "none", "auto", "required" or name a function, got {str(wanted)[:40]!r}',
                param="tool_choice",
            )
        return ToolChoice.of(functions, wanted or "auto", None, parallel=self.parallel_tool_calls)


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Which tools there are, and whether they may (auto), must (required, named) or must not (none) be called."""

    tools: Sequence[FunctionTool] = ()
    mode: str = "none"
    name: str | None = None
    parallel: bool = True

    @classmethod
    def of(
        cls, tools: Sequence[FunctionTool], mode: str, name: str | None = None, *, parallel: bool | None = True
    ) -> ToolChoice:
        """Checked.

        Raises:
            RequestError: two tools have one name, there are too many, or there is none to choose.
        """
        names = [tool.name for tool in tools]
        if len(names) > MAX_TOOLS:
            raise RequestError(f"tools holds {len(names)} tools, at most {MAX_TOOLS} are supported", param="tools")
        if twice := next((one for one in names if names.count(one) > 1), None):
            raise RequestError(f"tools holds two functions of the name {twice!r}", param="tools")
        if mode in ("required", "named") and not tools:
            raise RequestError(f"tool_choice {mode!r} needs tools", param="tool_choice")
        if mode == "named" and name not in names:
            known = ", ".join(names)
            raise RequestError(f"tool_choice names {str(name)[:64]!r}; the tools are {known}", param="tool_choice")
        return cls(tools=tools, mode=mode if tools else "none", name=name, parallel=parallel is not False)

    @property
    def forced(self) -> bool:
        return self.mode in ("required", "named")

    def usable(self) -> list[dict[str, Any]]:
        """The tools that the model is told of."""
        return [] if self.mode == "none" else [tool.plain() for tool in self.tools]
