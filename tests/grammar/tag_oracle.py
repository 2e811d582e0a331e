"""What structural tags accept, read off their description: an oracle that knows nothing of grammars."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Format = Mapping[str, Any]


def accepted(wanted: Format, text: str) -> bool:
    return len(text) in after(wanted, text, 0, ())


def after(wanted: Format, text: str, at: int, ends: Sequence[str]) -> set[int]:
    """Where a format that begins at ``at``, and one of the ends after it, may end. JSON is a digit here, with blanks
    around it as RFC 8259 has them: llguidance lets them come in some places."""
    kind = wanted["type"]
    if kind == "any_text":
        return _free(text, at, ends, wanted.get("excludes", ()))
    if kind == "triggered_tags":
        return _triggered(wanted, text, at, ends)
    if kind == "tag":
        return _tag(wanted, wanted["begin"], text, at, ends)
    if kind == "or":
        return set().union(*(after(element, text, at, ends) for element in wanted["elements"]))
    if kind == "sequence":
        places = {at}
        for element in wanted["elements"][:-1]:
            places = set().union(*(after(element, text, place, ()) for place in places))
        return set().union(*(after(wanted["elements"][-1], text, place, ends) for place in places))
    return _closed(_plain(wanted, text, at), text, ends)


def _plain(wanted: Format, text: str, at: int) -> set[int]:
    if wanted["type"] == "const_string":
        return {at + len(wanted["value"])} if text.startswith(wanted["value"], at) else set()
    if wanted["type"] == "json_schema":
        document = re.compile(r"[ \t\r\n]*[0-9]").match(text, at)
        if document is None:
            return set()
        blanks = re.compile(r"[ \t\r\n]*").match(text, document.end())
        assert blanks is not None
        return set(range(document.end(), blanks.end() + 1))
    if wanted["type"] == "optional":
        return {at} | after(wanted["content"], text, at, ())
    assert wanted["type"] in ("star", "plus")
    found = {at} if wanted["type"] == "star" else after(wanted["content"], text, at, ())
    while more := set().union(*(after(wanted["content"], text, place, ()) for place in found)) - found:
        found |= more
    return found


def _tag(wanted: Format, begin: str, text: str, at: int, ends: Sequence[str]) -> set[int]:
    if not text.startswith(begin, at):
        return set()
    if not wanted["end"]:
        return after(wanted["content"], text, at + len(begin), ends)
    own = [wanted["end"]] if isinstance(wanted["end"], str) else wanted["end"]
    return _closed(after(wanted["content"], text, at + len(begin), own), text, ends)


def _closed(places: Iterable[int], text: str, ends: Sequence[str]) -> set[int]:
    if not ends:
        return set(places)
    return {place + len(end) for place in places for end in ends if text.startswith(end, place)}


def _free(text: str, at: int, ends: Sequence[str], excludes: Sequence[str]) -> set[int]:
    places = set()
    for place in range(at, len(text) + 1):
        seen = text[at:place]
        if ends and any(seen.endswith(end) for end in ends):
            return {place}
        if any(seen.endswith(other) for other in excludes):
            break
        places.add(place)
    return set() if ends else places


def _triggered(wanted: Format, text: str, at: int, ends: Sequence[str]) -> set[int]:
    once, triggers = wanted.get("stop_after_first", False), wanted["triggers"]
    inner = ends if once else ()
    begun = {at}
    found: set[int] = set()
    if wanted.get("at_least_one"):
        begun = set().union(*(_tag(tag, tag["begin"], text, at, inner) for tag in wanted["tags"]))
        if once:
            return begun
    seen: set[int] = set()
    while begun - seen:
        start = min(begun - seen)
        seen.add(start)
        found |= _free(text, start, ends, (*triggers, *wanted.get("excludes", ())))
        for trigger in triggers:
            stops = [*(other for other in triggers if other != trigger), *ends, *wanted.get("excludes", ())]
            for place in _free(text, start, [trigger], stops):
                begin = place - len(trigger)
                tags = [tag for tag in wanted["tags"] if tag["begin"].startswith(trigger)]
                done = set().union(*(_tag(tag, tag["begin"], text, begin, inner) for tag in tags))
                if once:
                    found |= done
                else:
                    begun |= done
    return found
