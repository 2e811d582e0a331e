"""Turns generated ids into text piece by piece, in linear time, without ever showing half a character."""

from __future__ import annotations

from collections.abc import Sequence

from jaxcb.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
"""What tokenizers put where the bytes are not (yet) a character."""

_CONTEXT_IDS = 8
"""Ids of the prompt that tell how the first generated id reads: after a space, or as the rest of a character."""
_MAX_CHARACTER_IDS = 4
"""A character takes at most 4 bytes, and an id at least one."""
_MAX_HELD_IDS = 8
"""Ids that may wait for a character to become whole before they are given up."""


class Detokenizer:
    """Text of one sequence, a few ids at a time.

    The pieces concatenate to ``decode(prompt + generated)`` without its prompt part. (``tokenizers.DecodeStream`` comes
    close, but it holds undecodable bytes for ever at quadratic cost, and repeats the prompt when that ends inside a
    character.) One case can't match a full decode: byte-fallback tokenizers rewrite a whole run of byte tokens when a
    later byte of it turns out invalid; characters already shown stay as they are.

    A short window of ids is decoded again at every call. ``_window[:_num_context]`` only gives context: its text,
    ``_shown``, is out. The rest is held.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._start_window(self._prompt_tail(prompt_ids))

    def add(self, token_ids: Sequence[int]) -> str:
        """Take the next generated ids; return the text that is certain now ("" while a character is incomplete)."""
        if len(token_ids) > _MAX_HELD_IDS:  # keeps the window, and so the cost of an id, bounded
            chunks = range(0, len(token_ids), _MAX_HELD_IDS)
            return "".join(self.add(token_ids[start : start + _MAX_HELD_IDS]) for start in chunks)
        self._window.extend(token_ids)
        end, text = self._last_complete(len(token_ids))
        piece = self._unseen(text, end) if end > self._num_context else ""
        if piece:
            inside_character = self._shown.endswith(REPLACEMENT)  # then the new ids alone would decode differently
            start = 0 if inside_character else self._num_context
            self._start_window(self._window[start:end], held=self._window[end:])
        elif len(self._window) - self._num_context > _MAX_HELD_IDS:
            return self._give_up_waiting()
        return piece

    def flush(self) -> str:
        """The text still held back, half characters included: no more ids will come."""
        piece = self._unseen(self._decode(self._window), len(self._window))
        self._start_window(self._window[self._num_context :])
        return piece

    def _start_window(self, context: list[int], held: Sequence[int] = ()) -> None:
        self._shown = self._decode(context)
        self._num_context = len(context)
        self._window = [*context, *held]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)

    def _last_complete(self, num_new: int) -> tuple[int, str]:
        """The longest beginning of the window that ends with a whole character: (ids, their text).

        It ends in one of the ``num_new`` last ids, the others were tried before, and before those four that can be
        the beginning of a character. If there is none: (``_num_context``, "").
        """
        for end in range(len(self._window), len(self._window) - min(num_new, _MAX_CHARACTER_IDS), -1):
            text = self._decode(self._window[:end])
            if not text.endswith(REPLACEMENT):
                return end, text
        return self._num_context, ""

    def _unseen(self, text: str, end: int) -> str:
        """What ``text``, decoded from ``_window[:end]``, adds to the text that is out."""
        if text.startswith(self._shown):
            return text[len(self._shown) :]
        complete = self._shown.rstrip(REPLACEMENT)
        if complete != self._shown and text.startswith(complete):  # the prompt ended inside a character
            return text[len(complete) :]
        return self._decode(self._window[self._num_context : end])

    def _give_up_waiting(self) -> str:
        """Show all but the last ids of a window that grew too long: they have no text, or never become characters.

        A cut between two ids is clean if both sides decode to what they decode to together. One of any four
        neighbouring cuts is, since a character takes at most four bytes; what stands before it is final.
        """
        text = self._decode(self._window)
        for cut in range(len(self._window) - _MAX_CHARACTER_IDS, len(self._window)):
            before = self._decode(self._window[:cut])
            if before + self._decode(self._window[cut:]) == text:
                break
        else:
            cut, before = len(self._window), text
        piece = self._unseen(before, cut)
        context = self._window[cut - 1 : cut] if piece else self._window[: self._num_context]
        self._start_window(context, held=self._window[cut:])
        return piece

    def _prompt_tail(self, prompt_ids: Sequence[int]) -> list[int]:
        """The last ids of the prompt: enough for some text, and not beginning inside a character if possible."""
        count = min(_CONTEXT_IDS, len(prompt_ids))
        while count < len(prompt_ids) and not self._decode(prompt_ids[-count:]):
            count = min(2 * count, len(prompt_ids))
        longest = min(count + _CONTEXT_IDS, len(prompt_ids))
        while count < longest and self._decode(prompt_ids[-count:]).startswith(REPLACEMENT):
            count += 1
        return list(prompt_ids[-count:]) if count else []
