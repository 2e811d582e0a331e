"""From StructuredOutputs to llguidance's own notation, in which every kind of language is a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import llguidance

from jaxcb.errors import RequestError
from jaxcb.grammar import gbnf, structural_tag
from jaxcb.structured_outputs import StructuredOutputs

_NOT_KEPT = re.compile(r"^[ \t]*[?!]?[\w-]+[ \t]*\[[^\]\n]*\b(stop|temperature)[ \t]*=", re.MULTILINE)
"""Attributes of Lark rules that llguidance leaves to its caller."""
_WHITESPACE = r"[ \t\r\n]{1,64}"
"""Between the elements of JSON: bounded, or a model with nothing to say writes blanks until its tokens are spent."""
_OPTIONS = "x-guidance"
"""Where a schema holds llguidance's options."""
_REGEX_SYNTAX = re.compile(r"[\\.+*?()|\[\]{}^$&~#-]")


def source_of(wanted: StructuredOutputs, special_tokens: Mapping[str, int]) -> str:
    """The grammar, which nobody has looked at yet. ``special_tokens`` are the tokenizer's ids of those that text can't
    spell, by their names.

    Raises:
        RequestError: it can't be written as one; ``.param`` names the field.
    """
    if wanted.structural_tag is not None:
        assert isinstance(wanted.structural_tag, Mapping)  # StructuredOutputs has read it
        return _structural_tag(wanted.structural_tag, special_tokens)
    return _SOURCES[wanted.kind](wanted)


def _json(wanted: StructuredOutputs) -> str:
    schema = {"type": "object"} if wanted.json is None else wanted.json
    assert isinstance(schema, Mapping)  # StructuredOutputs has read it
    if wanted.disable_any_whitespace:
        options: dict[str, Any] = {"whitespace_flexible": False}
    else:
        options = {"whitespace_pattern": wanted.whitespace_pattern or _WHITESPACE}
    return llguidance.LLMatcher.grammar_from_json_schema(_schema(schema, "json", options))


def _schema(schema: Mapping[str, Any], kind: str, options: Mapping[str, Any]) -> str:
    """A JSON schema with llguidance's own options, which nobody else is to set: they could loosen it."""
    if _OPTIONS in schema:
        raise RequestError(
            f"structured_outputs.{kind} has the key {_OPTIONS!r}, which is no keyword of JSON schema",
            param=f"structured_outputs.{kind}",
        )
    return json.dumps({**schema, _OPTIONS: {"lenient": False, "coerce_one_of": False, **options}})


def _regex(wanted: StructuredOutputs) -> str:
    assert wanted.regex is not None
    return llguidance.LLMatcher.grammar_from_regex(wanted.regex)


def _choice(wanted: StructuredOutputs) -> str:
    assert wanted.choice is not None
    return llguidance.LLMatcher.grammar_from_regex(
        "|".join(_REGEX_SYNTAX.sub(r"\\\g<0>", text) for text in wanted.choice)
    )


def _grammar(wanted: StructuredOutputs) -> str:
    assert wanted.grammar is not None
    return llguidance.LLMatcher.grammar_from_lark(_lark(wanted.grammar, "grammar"))


def _lark(text: str, kind: str) -> str:
    """A grammar in Lark's notation, which may have been in GBNF."""
    if gbnf.is_gbnf(text):
        return gbnf.lark_of(text, kind)
    if found := _NOT_KEPT.search(text):
        raise RequestError(
            f"structured_outputs.{kind} has the attribute {found[1]!r}, which can't be kept: it takes back what was "
            "said, or is no matter of the language",
            param=f"structured_outputs.{kind}",
        )
    return text


def _structural_tag(tag: Mapping[str, Any], special_tokens: Mapping[str, int]) -> str:
    return structural_tag.lark_of(
        tag,
        special_tokens,
        lambda schema: _schema(schema, "structural_tag", {"whitespace_pattern": _WHITESPACE}),
        lambda text: _lark(text, "structural_tag"),
    )


_SOURCES: Mapping[str, Callable[[StructuredOutputs], str]] = {
    "json": _json,
    "json_object": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
