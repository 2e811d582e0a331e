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
    param = "tools"
    if choice.forced:
        if wanted is not None:
            raise RequestError(
                "tool_choice forces a call, and another field holds the answer to something else: send one of them",
                param="tool_choice",
            )
        schema = forced_schema(choice.usable(), choice.name, parallel=choice.parallel)
        language: StructuredOutputs | None = StructuredOutputs(json=schema, whitespace_pattern=" ?")
    elif wanted is None and choice.mode == "auto" and any(tool.strict for tool in choice.tools):
        language = StructuredOutputs(structural_tag=_strict_tags(choice, tools))
    else:
        language, param = wanted, ""
    if language is None:
        return None
    markers = service.reasoning
    if markers is not None and language.reasoning_end is None and not prompt.rstrip().endswith(markers.end):
        language = dataclasses.replace(language, reasoning_end=markers.end)
    try:
        service.engine.compile_grammar(language)
    except RequestError as error:
        raise RequestError(str(error), param=param or error.param) from error
    return language


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
