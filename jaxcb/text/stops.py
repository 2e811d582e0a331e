"""Stop strings in a stream of text pieces, found wherever the pieces happen to be cut."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Looks for stop strings and holds back text that may still become one.

    The match that is complete first wins; of several that end at the same character, the longest. So the result
    depends on the text alone, never on how it was cut into pieces. Time is linear in the text (one Knuth-Morris-Pratt
    automaton a stop string).

    Example, stop string "END" (pieces on the left, what ``add`` returns on the right)::

        "Hello E"  -> ("Hello ", None)     "E" may become "END"
        "N"        -> ("", None)
        "T"        -> ("ENT", None)        it did not
        "RY.EN"    -> ("RY.", None)
        "D and"    -> ("", "END")          with include_stop: ("END", "END")
    """

    def __init__(self, stop: Sequence[str], include_stop: bool = False):
        self._stops = tuple(stop)
        self._include_stop = include_stop
        self._fallbacks = [borders(text) for text in self._stops]
        self._matched = [0] * len(self._stops)
        """Characters at the end of the text so far that match the beginning of each stop string."""
        self._held = ""

    def add(self, piece: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Take the next text and return (text that is safe to show, stop string that ended the stream or None).

        After a match the rest of the text is dropped, and the matcher must not be used again. While not ``armed`` a
        complete stop string is passed by, and one that is complete only later is still seen whole.
        """
        if not self._stops:
            return piece, None
        text = self._held + piece
        for end, char in enumerate(piece, start=len(self._held) + 1):
            matched = self._step(char)
            if matched is not None and armed:
                return text[:end] if self._include_stop else text[: end - len(matched)], matched
        safe = len(text) - max(self._matched)
        self._held = text[safe:]
        return text[:safe], None

    def flush(self) -> str:
        """The text still held back: the stream ended and it became no stop string."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _step(self, char: str) -> str | None:
        """Advance every automaton by one character; the longest stop string that is now complete, if any."""
        complete: str | None = None
        for index, stop in enumerate(self._stops):
            length = self._matched[index]
            while length and stop[length] != char:
                length = self._fallbacks[index][length - 1]
            if stop[length] == char:
                length += 1
            if length == len(stop):
                if complete is None or len(stop) > len(complete):
                    complete = stop
                length = self._fallbacks[index][-1]
            self._matched[index] = length
        return complete


def borders(text: str | bytes) -> list[int]:
    """For every prefix of ``text``: the length of its longest proper border (Knuth, Morris and Pratt 1977). "abab" ->
    [0, 0, 1, 2]."""
    found = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[length] != text[index]:
            length = found[length - 1]
        if text[length] == text[index]:
            length += 1
        found[index] = length
    return found
