"""What an answer is held to: a language that the body asks for, or calls of the tools that it forces."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxcb.errors import RequestError
from jaxcb.parsing.choose import ToolFormat
from jaxcb.parsing.forced import forced_schema
from jaxcb.serve.tools import ToolChoice
from jaxcb.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from jaxcb.serve.service import Service


def constraint(
    choice: ToolChoice, tools: ToolFormat, wanted: StructuredOutputs | None, service: Service, prompt: str
) -> StructuredOutputs | None:
    """The one language of an answer to ``prompt``, compiled. A model that reasons does so freely before it.

    Arguments:
        wanted: what the body asks for beside its tools.

    Raises:
        RequestError: two things are asked for, or a schema can't be kept; ``.param`` names the field.
    """
    if choice.forced and wanted is not None:
        raise RequestError(
            "tool_choice forces a call, and another field holds the answer to something else: send one of them",
            param="tool_choice",
        )
    try:
        language = wanted or _of_tools(choice, tools)
        if language is None:
            return None
        markers = service.reasoning
        if markers is not None and language.reasoning_end is None and not prompt.rstrip().endswith(markers.end):
            language = dataclasses.replace(language, reasoning_end=markers.end)
        service.engine.compile_grammar(language)
        return language
    except RequestError as error:
        if wanted is not None or not (error.param or "").startswith("structured_outputs"):
            raise
        raise _of_tool(error, choice, service) from error


def _of_tools(choice: ToolChoice, tools: ToolFormat) -> StructuredOutputs | None:
    """What the choice of a tool, or a tool's ``strict``, holds the answer to."""
    if choice.forced:
        schema = forced_schema(choice.usable(), choice.name, parallel=choice.parallel)
        return StructuredOutputs(json=schema, whitespace_pattern=" ?")
    if choice.mode == "auto" and any(tool.strict for tool in choice.tools):
        return StructuredOutputs(structural_tag=_strict_tags(choice, tools))
    return None


def _of_tool(error: RequestError, choice: ToolChoice, service: Service) -> RequestError:
    """Which tool's schema it is that can't be kept, if one of them can't be by itself."""
    for index, tool in enumerate(choice.tools):
        try:
            service.engine.compile_grammar(StructuredOutputs(json=tool.parameters or {"type": "object"}))
        except RequestError as own:
            what = str(own).removeprefix("structured_outputs.json ")
            return RequestError(f"tools[{index}]: the schema of {tool.name!r} {what}", param=f"tools[{index}]")
    what = str(error).partition(" ")[2]
    return RequestError(f"tools: a grammar of all their schemas {what}", param="tools")


def _strict_tags(choice: ToolChoice, tools: ToolFormat) -> Mapping[str, Any]:
    """Calls whose arguments follow their schemas, wherever the model begins one."""
    if tools.call_tag is None:
        raise RequestError(
            f"strict is not supported for calls as this model writes them ({tools.name}) under tool_choice auto: leave "
            "it out, or force the call",
            param="tools",
        )
    begin, end, trigger = tools.call_tag
    structures = [
        {"begin": begin.replace("NAME", tool.name), "schema": tool.parameters or {"type": "object"}, "end": end}
        for tool in choice.tools
    ]
    return {"structures": structures, "triggers": [trigger]}
