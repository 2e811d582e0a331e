"""Fields of a structural tag's formats: their types, and errors that say where a wrong one stands.

``where`` is the place of a format in the tag, such as ``format.elements[1]``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jaxcb import validation
from jaxcb.errors import RequestError

PARAM = "structured_outputs.structural_tag"
Format = Mapping[str, Any]


def check_apart(texts: Sequence[str], where: str) -> None:
    """Of two texts that are looked for, the longer one would never be found if it held the other."""
    for text, other in itertools.permutations(texts, 2):
        if text in other:
            refuse(
                where,
                f"looks for {validation.shown(text)} and for {validation.shown(other)}, which holds it: triggers, "
                "exclusions and the end of the tag around them must not hold each other",
            )


def check_prefixes(ends: Sequence[str], where: str) -> None:
    """Of two ends of one tag: where one begins with the other, llguidance's lexer, which is greedy, would take the
    longer one, or begin it and fail where the text goes on otherwise."""
    for end, other in itertools.permutations(dict.fromkeys(ends), 2):
        if other.startswith(end):
            refuse(where, f"holds {validation.shown(end)} and {validation.shown(other)}, which begins with it")


def check_tag(tag: Any, where: str) -> None:
    if not isinstance(tag, Mapping) or tag.get("type", "tag") != "tag":
        refuse(where, f"must be a tag, got {validation.shown(tag)}")
    check_fields(tag, where, required=("begin", "content", "end"))
    text_of(tag, "begin", where)


def tags_of(wanted: Format, where: str) -> list[tuple[str, Any]]:
    """With where they stand. Where one begins with another's beginning, llguidance's lexer, which is greedy, takes one
    of the two: answers of the other that go on alike would be lost."""
    tags = [(f"{where}.tags[{index}]", tag) for index, tag in enumerate(list_of(wanted, "tags", where))]
    for place, tag in tags:
        check_tag(tag, place)
    for place, tag in tags:
        others = (at for at, other in tags if at != place and tag["begin"].startswith(other["begin"]))
        if (other := next(others, None)) is not None:
            refuse(f"{place}.begin", f"begins with {other}.begin: no tag may begin with what another one begins with")
    return tags


def list_of(wanted: Format, name: str, where: str) -> list[Any]:
    value = wanted[name]
    if not isinstance(value, list) or not value:
        refuse(_at(where, name), f"must be a list that is not empty, got {validation.shown(value)}")
    return value


def text_of(wanted: Format, name: str, where: str) -> str:
    value = wanted[name]
    if not isinstance(value, str):
        refuse(_at(where, name), f"must be a string, got {validation.shown(value)}")
    return value


def texts_of(wanted: Format, name: str, where: str, *, optional: bool = False) -> list[str]:
    value = wanted.get(name) or []
    if not isinstance(value, list) or not (value or optional) or not all(isinstance(text, str) for text in value):
        refuse(_at(where, name), f"must be a list of strings, got {validation.shown(value)}")
    return list(value)


def flag_of(wanted: Format, name: str, where: str, *, default: bool = False) -> bool:
    value = wanted.get(name, default)
    if not isinstance(value, bool):
        refuse(_at(where, name), f"must be true or false, got {validation.shown(value)}")
    return value


def count_of(wanted: Format, name: str, low: int, most: int, where: str) -> int:
    value = wanted.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= most:
        refuse(_at(where, name), f"must be an integer in [{low}, {most}], got {validation.shown(value)}")
    return value


def check_fields(wanted: Format, where: str, required: tuple[str, ...] = (), optional: tuple[str, ...] = ()) -> None:
    """Raise RequestError unless a format has these fields and no others."""
    known = {"type", *required, *optional}
    for name in required:
        if name not in wanted:
            refuse(_at(where, name), "is missing")
    for name in wanted:
        if name not in known:
            refuse(_at(where, str(name)[:80]), f"is not supported; the fields are {', '.join(sorted(known))}")


def _at(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def refuse(where: str, reason: str) -> NoReturn:
    raise RequestError(f"{PARAM}.{where} {reason}", param=PARAM)
