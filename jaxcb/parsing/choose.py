"""Which parsers a model's answers need: by name, or recognised by its chat template."""

from __future__ import annotations

import dataclasses
import secrets
import string
from collections.abc import Callable

from jaxcb.errors import ConfigError
from jaxcb.parsing import gemma, hermes, llama, mistral, pythonic, qwen_xml
from jaxcb.parsing.events import Parser, Sink
from jaxcb.parsing.reasoning import Markers


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How a family of models writes calls.

    Arguments:
        marks: texts that the parser needs to see; where the tokenizer has them as special tokens they must not be
            left out of the text.
        signs: what a chat template of the family holds, any of them.
        new_id: an id for a call, of the form that the family's template takes back.
        call_tag: the text before and after a call's arguments (NAME stands for the function's), and the text that
            always begins a call; None: these are not plain text.
    """

    name: str
    parser: Callable[[Sink], Parser]
    marks: tuple[str, ...]
    signs: tuple[str, ...]
    new_id: Callable[[], str]
    call_tag: tuple[str, str, str] | None = None


def _long_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    """Mistral's templates take ids of nine letters and digits."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


_FORMATS = (
    ToolFormat(
        name="qwen3_coder",
        parser=qwen_xml.QwenXmlParser,
        marks=(qwen_xml.BEGIN, qwen_xml.END),
        signs=(qwen_xml.FUNCTION,),
        new_id=_long_id,
    ),
    ToolFormat(
        name="mistral",
        parser=mistral.MistralParser,
        marks=(mistral.BEGIN, mistral.ARGS, mistral.CALL_ID),
        signs=(mistral.BEGIN,),
        new_id=_short_id,
    ),
    ToolFormat(
        name="gemma",
        parser=gemma.GemmaParser,
        marks=(*gemma.BLOCKS, *gemma.BLOCKS.values(), *gemma.RESPONSES, "<escape>", '<|"|>'),
        signs=("<start_function_call>", "<|tool_call>"),
        new_id=_long_id,
    ),
    ToolFormat(
        name="hermes",
        parser=hermes.HermesParser,
        marks=(hermes.BEGIN, hermes.END),
        signs=(hermes.BEGIN,),
        new_id=_long_id,
        call_tag=(f'{hermes.BEGIN}\n{{"name": "NAME", "arguments": ', f"}}\n{hermes.END}", hermes.BEGIN),
    ),
    ToolFormat(
        name="pythonic",
        parser=pythonic.PythonicParser,
        marks=(),
        signs=(pythonic.BEGIN, "func_name1(params_name1"),
        new_id=_long_id,
    ),
    ToolFormat(
        name="llama3_json",
        parser=llama.LlamaParser,
        marks=(llama.TAG,),
        signs=(llama.TAG, '"parameters": '),
        new_id=_long_id,
        call_tag=('{"name": "NAME", "parameters": ', "}", '{"name": '),
    ),
)
TOOL_PARSERS = {tools.name: tools for tools in _FORMATS}
TOOL_ALIASES = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_xml": "qwen3_coder",
    "llama4_pythonic": "pythonic",
    "functiongemma": "gemma",
    "gemma4": "gemma",
}
"""Names under which other servers have the same format."""

REASONING_PARSERS = {
    "qwen3": Markers("<think>", "</think>"),
    "deepseek_r1": Markers("<think>", "</think>", always=True),
    "mistral": Markers("[THINK]", "[/THINK]"),
}


def tool_format(name: str, template: str | None) -> ToolFormat | None:
    """The format called ``name``; "auto": that of the chat template, None if it is not recognised; "none": None.

    Raises:
        ConfigError: there is no such parser.
    """
    if name == "none":
        return None
    if name != "auto":
        name = TOOL_ALIASES.get(name, name)
        if name not in TOOL_PARSERS:
            raise _unknown("tool_call_parser", name, [*TOOL_PARSERS, *TOOL_ALIASES])
        return TOOL_PARSERS[name]
    if template is None or "tools" not in template:
        return None
    return next((tools for tools in _FORMATS if any(sign in template for sign in tools.signs)), None)


def reasoning_markers(name: str, template: str | None) -> Markers | None:
    """The markers called ``name``; "auto": those of the chat template, None if it has none; "none": None.

    Raises:
        ConfigError: there is no such parser.
    """
    if name == "none":
        return None
    if name != "auto":
        if name not in REASONING_PARSERS:
            raise _unknown("reasoning_parser", name, list(REASONING_PARSERS))
        return REASONING_PARSERS[name]
    found = (markers for markers in REASONING_PARSERS.values() if template and markers.end in template)
    return next(found, None)


def _unknown(param: str, name: str, known: list[str]) -> ConfigError:
    flag = "--" + param.replace("_", "-")
    return ConfigError(f"{flag} must be auto, none or one of {', '.join(known)}; got {name!r}", param=param)
