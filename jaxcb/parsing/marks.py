"""Finds markers in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class MarkSearch:
    """Text before the first of several markers, as soon as it is certain that it is before.

    Example, marker "<a>" (pieces on the left, what ``add`` returns on the right)::

        "x <"  -> ("x ", None, "")
        "b<"   -> ("<b", None, "")
        "a>y"  -> ("", "<a>", "y")
    """

    def __init__(self, marks: Sequence[str]):
        self._marks = tuple(marks)
        self._held = ""

    def add(self, piece: str) -> tuple[str, str | None, str]:
        """Returns (text before the marker, the marker or None, text behind it). After a marker the search is over, and
        may begin anew."""
        text = self._held + piece
        found = [(at, mark) for mark in self._marks if (at := text.find(mark)) >= 0]
        if found:
            at, mark = min(found, key=lambda hit: (hit[0], -len(hit[1])))
            self._held = ""
            return text[:at], mark, text[at + len(mark) :]
        safe = len(text) - self._partial(text)
        self._held = text[safe:]
        return text[:safe], None, ""

    def flush(self) -> str:
        """What was held back: no more text will come."""
        held, self._held = self._held, ""
        return held

    def _partial(self, text: str) -> int:
        """Characters at the end of ``text`` that may begin a marker."""
        longest = max(map(len, self._marks), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(mark.startswith(text[-length:]) for mark in self._marks):
                return length
        return 0
