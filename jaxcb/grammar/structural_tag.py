"""Structural tags: free text and constrained pieces in one answer, as a tree of formats.

The notation, and what each format means, are xgrammar's (its docs, "Structural Tag Usage"), which vLLM and SGLang take
too. What is not supported is refused by name: formats and limits that count tokens, and notations of JSON that are not
JSON. A JSON document may have blanks around it (RFC 8259, section 2), which llguidance lets come in some places.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llguidance import regex_to_lark

from jaxcb import validation
from jaxcb.grammar.lark import NOTHING, Lark, Piece
from jaxcb.grammar.tag_fields import (
    Format,
    check_apart,
    check_fields,
    check_prefixes,
    count_of,
    flag_of,
    list_of,
    refuse,
    tags_of,
    text_of,
    texts_of,
)

MAX_REPEATS = 1_000


def lark_of(
    tag: Mapping[str, Any],
    special_tokens: Mapping[str, int],
    json_source: Callable[[Any], str],
    grammar_source: Callable[[str], str],
) -> str:
    """llguidance's grammar of a structural tag, with ``format`` or, as it was before, ``structures`` and ``triggers``.

    Arguments:
        special_tokens: ids of the tokenizer's, by their texts: where a string holds one, that very token is meant.
        json_source: a JSON schema -> what stands after ``%json``.
        grammar_source: a grammar in Lark or GBNF -> Lark.

    Raises:
        RequestError: a format is wrong or not supported; the message says where it stands.
    """
    return _Translator(special_tokens, json_source, grammar_source).grammar(tag)


class _Translator:
    """Of one tag. Each format is translated together with the ends that may follow it (those of the tag around it),
    for free text has to know them."""

    def __init__(
        self,
        special_tokens: Mapping[str, int],
        json_source: Callable[[Any], str],
        grammar_source: Callable[[str], str],
    ):
        self._lark = Lark(special_tokens)
        self._json_source, self._grammar_source = json_source, grammar_source

    def grammar(self, tag: Mapping[str, Any]) -> str:
        if "format" in tag:
            check_fields(tag, "", required=("format",), optional=("type",))
            wanted = tag["format"]
        else:
            wanted = _triggered_tags(tag)
        return self._lark.grammar(self._of(wanted, "format", ()))

    def _of(self, wanted: Any, where: str, ends: Sequence[str]) -> Piece:
        """A format, and after it one of the ends, if there are any."""
        kind = wanted.get("type") if isinstance(wanted, Mapping) else None
        translate = _FORMATS.get(kind) if isinstance(kind, str) else None
        if translate is None:
            known = ", ".join(sorted(_FORMATS))
            refuse(where, f"must be an object with one of the types {known}; got {validation.shown(kind or wanted)}")
        piece = translate(self, wanted, where, ends)
        if piece.json_twice:
            refuse(where, "puts two JSON documents together with nothing that tells one from the other")
        return piece

    def const_string(self, wanted: Format, where: str, ends: Sequence[str]) -> Piece:
        check_fields(wanted, where, required=("value",))
        return self._lark.closed(self._lark.literal(text_of(wanted, "value", where)), ends)

    def regex(self, wanted: Format, where: str, ends: Sequence[str]) -> Piece:
        check_fields(wanted, where, required=("pattern",))
        pattern = text_of(wanted, "pattern", where)
        piece = Piece(f"/{regex_to_lark(pattern, '')}/", empty=True)  # for all that is known
        return self._lark.closed(piece if pattern else NOTHING, ends)

    def any_text(self, wanted: Format, where: str, ends: Sequence[str]) -> Piece:
        check_fields(wanted, where, optional=("excludes",))
        without = [text for text in texts_of(wanted, "excludes", where, optional=True) if text not in ends]
        if not ends:
            return self._lark.text_without(without)
        reached = [end for end in ends if not any(other in end and other != end for other in ends)]
        check_apart([*reached, *without], where)
        return self._lark.either(self._lark.text_up_to(reached, without))

    def json_schema(self, wanted: Format, where: str, ends: Sequence[str]) -> Piece:
        check_fields(wanted, where, required=("json_schema",), optional=("style", "any_order"))
        schema = wanted["json_schema"]
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            refuse(f"{where}.json_schema", f"must be a JSON schema, got {validation.shown(schema)}")
        if wanted.get("style", "json") != "json":
            refuse(f"{where}.style", f'must be "json", got {validation.shown(wanted["style"])}')
        if wanted.get("any_order", False) is not False:
            refuse(f"{where}.any_order", "is not supported: properties come in the schema's order")
        document = Piece(f"%json {self._json_source(schema)}", regular=False, json_first=True, json_last=True)
        return self._lark.closed(document, ends)

    def grammar_text(self, wanted: Format, where: str, ends: Sequence[str]) -> Piece:
        check_fields(wanted, where, required=("grammar",))
        lark = self._grammar_source(text_of(wanted, "grammar", where))
        return self._lark.closed(self._lark.other(lark), ends)

    def sequence(self, wanted: Format, where: str, ends: Sequence[str]) -> Piece:
        check_fields(wanted, where, required=("elements",))
        elements = list_of(wanted, "elements", where)
        pieces = []
        for index, element in enumerate(elements):
            place, last = f"{where}.elements[{index}]", index == len(elements) - 1
            pieces.append(self._of(element, place, ends if last else ()))
            if pieces[-1].open and not last:
                refuse(place, "is free text, which has no end that would tell it from the next element")
        return self._lark.joined(pieces)

    def alternatives(self, wanted: Format, where: str, ends: Sequence[str]) -> Piece:
        check_fields(wanted, where, required=("elements",))
        elements = enumerate(list_of(wanted, "elements", where))
        return self._lark.either([self._of(element, f"{where}.elements[{index}]", ends) for index, element in elements])

    def optional(self, wanted: Format, where: str, ends: Sequence[str]) -> Piece:
        check_fields(wanted, where, required=("content",))
        return self._lark.either(
            [self._of(wanted["content"], f"{where}.content", ends), self._lark.closed(NOTHING, ends)]
        )

    def plus(self, wanted: Format, where: str, ends: Sequence[str]) -> Piece:
        return self._repeated(wanted, where, ends, 1, None)

    def star(self, wanted: Format, where: str, ends: Sequence[str]) -> Piece:
        return self._repeated(wanted, where, ends, 0, None)

    def repeat(self, wanted: Format, where: str, ends: Sequence[str]) -> Piece:
        least, most = (count_of(wanted, name, low, MAX_REPEATS, where) for name, low in (("min", 0), ("max", -1)))
        if -1 < most < least:
            refuse(where, f"has min {least}, which is above its max {most}")
        return self._repeated(wanted, where, ends, least, None if most == -1 else most, required=("min", "max"))

    def _repeated(
        self,
        wanted: Format,
        where: str,
        ends: Sequence[str],
        least: int,
        most: int | None,
        required: tuple[str, ...] = (),
    ) -> Piece:
        check_fields(wanted, where, required=("content", *required))
        piece = self._of(wanted["content"], f"{where}.content", ())
        if piece.open:
            refuse(f"{where}.content", "is free text, which can't be repeated: it has no end")
        return self._lark.closed(self._lark.times(piece, least, most), ends)

    def tag(self, wanted: Format, where: str, ends: Sequence[str]) -> Piece:
        check_fields(wanted, where, required=("begin", "content", "end"))
        return self._lark.joined(
            [self._lark.literal(text_of(wanted, "begin", where)), self._after_begin(wanted, where, ends)]
        )

    def _after_begin(self, wanted: Format, where: str, ends: Sequence[str]) -> Piece:
        """Content and end of a tag."""
        own = texts_of({"end": [wanted["end"]] if isinstance(wanted["end"], str) else wanted["end"]}, "end", where)
        if "" in own:
            if len(own) > 1:
                refuse(f"{where}.end", "holds an empty string beside others")
            return self._of(wanted["content"], f"{where}.content", ends)
        content = wanted["content"]
        if not isinstance(content, Mapping) or content.get("type") != "any_text":
            check_prefixes(own, f"{where}.end")
        return self._lark.closed(self._of(content, f"{where}.content", own), ends)

    def tags_with_separator(self, wanted: Format, where: str, ends: Sequence[str]) -> Piece:
        check_fields(wanted, where, required=("tags", "separator"), optional=("at_least_one", "stop_after_first"))
        tags = [self.tag(tag, place, ()) for place, tag in tags_of(wanted, where)]
        if any(tag.open for tag in tags):
            refuse(f"{where}.tags", "hold free text without an end")
        one, separator = self._lark.either(tags), self._lark.literal(text_of(wanted, "separator", where))
        several = self._lark.joined([one, self._lark.times(self._lark.joined([separator, one]), 0, None)])
        whole = one if flag_of(wanted, "stop_after_first", where) else several
        if not flag_of(wanted, "at_least_one", where):
            whole = self._lark.either([whole, NOTHING])
        return self._lark.closed(whole, ends)

    def triggered_tags(self, wanted: Format, where: str, ends: Sequence[str]) -> Piece:
        optional = ("at_least_one", "stop_after_first", "excludes")
        check_fields(wanted, where, required=("triggers", "tags"), optional=optional)
        at_least_one, once = (flag_of(wanted, name, where) for name in ("at_least_one", "stop_after_first"))
        triggers = texts_of(wanted, "triggers", where)
        without = [text for text in texts_of(wanted, "excludes", where, optional=True) if text not in ends]
        check_apart([*triggers, *ends, *without], where)
        tags, after = tags_of(wanted, where), ends if once else ()
        if at_least_one:
            first = self._lark.either([self.tag(tag, place, after) for place, tag in tags])
            if once:
                return first
        calls = self._calls(triggers, tags, where, after)
        if not once and any(rest.open for rests in calls.values() for rest in rests):
            refuse(f"{where}.tags", "hold free text without an end, and more may follow: give it an end")
        *called, rest = self._free_text(triggers, ends, without)
        begun = zip(called, calls.values(), strict=True)
        call = self._lark.either([self._lark.joined([text, self._lark.either(rests)]) for text, rests in begun])
        if once:
            return self._lark.either([call, rest])
        return self._lark.joined([first if at_least_one else NOTHING, self._lark.times(call, 0, None), rest])

    def _calls(
        self, triggers: Sequence[str], tags: Sequence[tuple[str, Any]], where: str, ends: Sequence[str]
    ) -> dict[str, list[Piece]]:
        """What may come after each trigger."""
        calls: dict[str, list[Piece]] = {trigger: [] for trigger in triggers}
        for place, tag in tags:
            trigger: str | None = next((text for text in triggers if tag["begin"].startswith(text)), None)
            if trigger is None:
                refuse(f"{place}.begin", "starts with none of the triggers")
            begin = self._lark.literal(tag["begin"][len(trigger) :])
            calls[trigger].append(self._lark.joined([begin, self._after_begin(tag, place, ends)]))
        for trigger, rests in calls.items():
            if not rests:
                refuse(f"{where}.triggers", f"holds {validation.shown(trigger)}, with which no tag begins")
        return calls

    def _free_text(self, triggers: Sequence[str], ends: Sequence[str], without: Sequence[str]) -> list[Piece]:
        """Up to each of the triggers; the last one is that up to an end, or without triggers to the end of it all."""
        pieces = self._lark.text_up_to([*triggers, *ends], without)
        rest = self._lark.either(pieces[len(triggers) :]) if ends else self._lark.text_without([*triggers, *without])
        return [*pieces[: len(triggers)], rest]

    def dispatch(self, wanted: Format, where: str, ends: Sequence[str]) -> Piece:
        """Another way to write triggered tags."""
        check_fields(wanted, where, required=("rules",), optional=("loop", "excludes"))
        tags = []
        for index, rule in enumerate(list_of(wanted, "rules", where)):
            if not isinstance(rule, list) or len(rule) != 2 or not isinstance(rule[0], str):
                refuse(f"{where}.rules[{index}]", f"must be a string and a format, got {validation.shown(rule)}")
            tags.append({"begin": rule[0], "content": rule[1], "end": ""})
        triggers = list(dict.fromkeys(tag["begin"] for tag in tags))
        once = not flag_of(wanted, "loop", where, default=True)
        same = {"triggers": triggers, "tags": tags, "stop_after_first": once, "excludes": wanted.get("excludes")}
        return self.triggered_tags(same, where, ends)


_FORMATS: Mapping[str, Callable[[_Translator, Format, str, Sequence[str]], Piece]] = {
    "const_string": _Translator.const_string,
    "json_schema": _Translator.json_schema,
    "grammar": _Translator.grammar_text,
    "regex": _Translator.regex,
    "any_text": _Translator.any_text,
    "sequence": _Translator.sequence,
    "or": _Translator.alternatives,
    "optional": _Translator.optional,
    "plus": _Translator.plus,
    "star": _Translator.star,
    "repeat": _Translator.repeat,
    "tag": _Translator.tag,
    "triggered_tags": _Translator.triggered_tags,
    "tags_with_separator": _Translator.tags_with_separator,
    "dispatch": _Translator.dispatch,
}


def _triggered_tags(tag: Mapping[str, Any]) -> Format:
    """The notation with structures and triggers as a format."""
    check_fields(tag, "", required=("structures", "triggers"), optional=("type",))
    tags = []
    for index, structure in enumerate(list_of(tag, "structures", "")):
        where = f"structures[{index}]"
        if not isinstance(structure, Mapping):
            refuse(where, f"must be an object, got {validation.shown(structure)}")
        check_fields(structure, where, required=("begin", "end"), optional=("schema", "type"))
        schema = structure.get("schema", {})
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except ValueError as error:
                refuse(f"{where}.schema", f"is not JSON: {error}")
        content = {"type": "json_schema", "json_schema": schema}
        tags.append({"begin": structure["begin"], "content": content, "end": structure["end"]})
    return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}
