"""From StructuredOutputs to llguidance's own notation, in which every kind of language is a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import llguidance
from llguidance import gbnf_to_lark

from jaxcb import validation
from jaxcb.errors import RequestError
from jaxcb.structured_outputs import StructuredOutputs

_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_WHITESPACE = r"[ \t\r\n]{1,64}"
"""Between the elements of JSON: bounded, or a model with nothing to say writes blanks until its tokens are spent."""
_REGEX_SYNTAX = re.compile(r"[\\.+*?()|\[\]{}^$&~#-]")


def source_of(wanted: StructuredOutputs, special_tokens: Collection[str] = ()) -> str:
    """The grammar, which nobody has looked at yet. ``special_tokens`` are the tokenizer's, which text can't spell.

    Raises:
        RequestError: it can't be written as one; ``.param`` names the field.
    """
    if wanted.structural_tag is not None:
        return _structural_tag(wanted.structural_tag, special_tokens)
    return _SOURCES[wanted.kind](wanted)


def _json(wanted: StructuredOutputs) -> str:
    schema = {"type": "object"} if wanted.json is None else wanted.json
    options: dict[str, Any] = {"lenient": False, "coerce_one_of": False}  # whatever the schema says of itself
    if wanted.disable_any_whitespace:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = wanted.whitespace_pattern or _WHITESPACE
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)  # type: ignore[arg-type]  # its TypedDict has no name at run time


def _regex(wanted: StructuredOutputs) -> str:
    assert wanted.regex is not None
    return llguidance.LLMatcher.grammar_from_regex(wanted.regex)


def _choice(wanted: StructuredOutputs) -> str:
    assert wanted.choice is not None
    return llguidance.LLMatcher.grammar_from_regex(
        "|".join(_REGEX_SYNTAX.sub(r"\\\g<0>", text) for text in wanted.choice)
    )


def _grammar(wanted: StructuredOutputs) -> str:
    text = wanted.grammar
    assert text is not None
    if _GBNF_RULE.search(text):
        try:
            text = gbnf_to_lark.gbnf_to_lark(text)
        except Exception as error:  # a parser from outside: whatever it raises refuses this request
            raise RequestError(
                f"structured_outputs.grammar is not GBNF: {error}", param="structured_outputs.grammar"
            ) from error
    return llguidance.LLMatcher.grammar_from_lark(text)


def _structural_tag(tag: Mapping[str, Any] | str, special_tokens: Collection[str]) -> str:
    """Only the notation with ``structures`` and ``triggers``: what that of ``format`` can say has no counterpart."""
    assert isinstance(tag, Mapping)  # StructuredOutputs has read it
    param = "structured_outputs.structural_tag"
    if "format" in tag:
        raise RequestError(
            f'{param} has the field "format", which is not supported: give "structures" and "triggers"', param=param
        )
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not structures or not isinstance(triggers, list):
        raise RequestError(f"{param} needs structures and triggers, which are lists", param=param)
    tags = []
    for index, structure in enumerate(structures):
        where = f"{param}.structures[{index}]"
        if not isinstance(structure, Mapping):
            raise RequestError(f"{where} must be an object, got {validation.shown(structure)}", param=param)
        begin, end, schema = structure.get("begin"), structure.get("end"), structure.get("schema", {})
        if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, dict | str):
            raise RequestError(f"{where} needs begin and end, which are strings, and a schema", param=param)
        trigger = next((text for text in triggers if isinstance(text, str) and text and begin.startswith(text)), None)
        if trigger is None:
            raise RequestError(f"{where}.begin starts with none of the triggers", param=param)
        tags.append(llguidance.StructTag(trigger=trigger, begin=begin, grammar=schema, end=end))
    special = {tag.trigger in special_tokens for tag in tags}
    if len(special) > 1:
        raise RequestError(f"{param}.triggers are to be special tokens or texts, not both", param=param)
    return llguidance.StructTag.to_grammar(tags, assume_special=special == {True})


_SOURCES: Mapping[str, Callable[[StructuredOutputs], str]] = {
    "json": _json,
    "json_object": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
