"""Marker: the end of the part of an answer before its constrained one (``</think>``, say)."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from jaxcb.text.stops import borders


class Marker:
    """A marker and the tokens of a vocabulary that could run past it.

    ``token_bytes[id]`` is what a token stands for. Text is free up to the end of the marker, and constrained from there
    on, so no token may hold both: those that would are forbidden, and the marker ends where a token does.
    """

    def __init__(self, text: str, token_bytes: Sequence[bytes]):
        self.text = text.encode()
        self.token_bytes = token_bytes
        last = self.text[-1:]
        self._candidates = [token for token, piece in enumerate(token_bytes) if last in piece[:-1]]
        self._fallbacks = borders(self.text)
        self.overshooting = functools.cache(self._overshooting)
        """State -> the ids that are forbidden in it."""

    def after(self, state: int, token: int) -> int:
        """The state after a token: bytes of the marker that the text ends with; the marker's length once it has come.
        An id without a token stands for nothing."""
        for byte in self.token_bytes[token] if token < len(self.token_bytes) else b"":
            state = self._step(state, byte)
        return state

    def _overshooting(self, state: int) -> list[int]:
        return [token for token in self._candidates if self._runs_past(state, token)]

    def _runs_past(self, state: int, token: int) -> bool:
        for byte in self.token_bytes[token][:-1]:
            state = self._step(state, byte)
            if state == len(self.text):
                return True
        return False

    def _step(self, state: int, byte: int) -> int:
        while state and self.text[state] != byte:
            state = self._fallbacks[state - 1]
        return state + (self.text[state] == byte)
