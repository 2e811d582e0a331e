"""The calls of Gemma: FunctionGemma's ``<start_function_call>call:f{key:<escape>text<escape>}<end_function_call>``,
Gemma 4's ``<|tool_call>call:f{key:<|"|>text<|"|>}<tool_call|>``, and the ``tool_code`` blocks of Python of Gemma 3."""

from __future__ import annotations

import json
import re
from typing import Any

from jaxcb.parsing.events import Sink
from jaxcb.parsing.marks import MarkSearch
from jaxcb.parsing.pythonic import read_call

BLOCKS = {
    "<start_function_call>": "<end_function_call>",
    "<|tool_call>": "<tool_call|>",
    "```tool_code": "```",
}
"""What begins a call to what ends it."""
RESPONSES = ("<start_function_response>", "<|tool_response>")
"""With these the model would go on to make up the function's answer."""
_QUOTES = ("<escape>", '<|"|>', '"')
_NAME = re.compile(r"\s*call:([\w.-]+)\s*(?=\{)")
_BARE = re.compile(r"[^\s,:\[\]{}<\"]+")
_MAX_DEPTH = 32


class GemmaParser:
    """A call is given on when its block ends: until then its arguments are not JSON."""

    def __init__(self, sink: Sink):
        self._sink = sink
        self._begin = MarkSearch((*BLOCKS, *RESPONSES))
        self._end: MarkSearch | None = None
        self._mark = ""
        self._block = ""
        self._over = False

    def feed(self, text: str) -> None:
        while text and not self._over:
            if self._end is None:
                before, mark, text = self._begin.add(text)
                self._sink.text(before)
                if mark in RESPONSES:
                    self._over = True
                elif mark is not None:
                    self._mark, self._block, self._end = mark, "", MarkSearch((BLOCKS[mark],))
            else:
                piece, mark, text = self._end.add(text)
                self._block += piece
                if mark is not None:
                    self._close(mark)

    def finish(self) -> None:
        """The end of the answer ends a block too: the marker may be the model's end token."""
        if self._end is not None:
            self._block += self._end.flush()
            self._close("")
        self._sink.text(self._begin.flush())

    def _close(self, mark: str) -> None:
        self._end = None
        calls = _python_calls(self._block) if self._mark.startswith("`") else _own_calls(self._block)
        if not calls or any(name not in self._sink.names for name, _ in calls):
            self._sink.text(self._mark + self._block + mark)
            return
        for name, arguments in calls:
            self._sink.call(name)
            self._sink.arguments(arguments)


def _python_calls(block: str) -> list[tuple[str, str]]:
    """A call a line, or several in a list."""
    lines = [line.strip().removeprefix("[").rstrip("],").strip() for line in block.strip().splitlines()]
    calls = [read_call(line.removeprefix("print(").removesuffix(")") if line.startswith("print(") else line)
             for line in lines if line]  # fmt: skip
    return [call for call in calls if call is not None] if None not in calls else []


def _own_calls(block: str) -> list[tuple[str, str]]:
    """The one call of a block, as a list; empty if it is none."""
    head = _NAME.match(block)
    if head is None:
        return []
    try:
        reader = _Reader(block, head.end())
        values = reader.value()
        reader.expect_end()
        return [(head[1], json.dumps(values, ensure_ascii=False))]
    except (ValueError, IndexError):
        return []


class _Reader:
    """Reads Gemma's notation of values. ValueError or IndexError: it is none."""

    def __init__(self, text: str, at: int):
        self._text, self._at, self._depth = text, at, 0

    def value(self) -> Any:
        self._skip()
        for quote in _QUOTES:
            if self._text.startswith(quote, self._at):
                return self._string(quote)
        char = self._text[self._at]
        if char in "{[":
            self._depth += 1
            if self._depth > _MAX_DEPTH:
                raise ValueError("nested too deeply")
            found = self._object() if char == "{" else self._list()
            self._depth -= 1
            return found
        return _bare(self._word())

    def expect_end(self) -> None:
        self._skip()
        if self._at != len(self._text):
            raise ValueError(f"something follows at {self._at}")

    def _object(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self._closes("}"):
            key = next((self._string(quote) for quote in _QUOTES if self._text.startswith(quote, self._at)), None)
            key = self._word() if key is None else key
            self._skip()
            if self._text[self._at] != ":":
                raise ValueError(f"no colon at {self._at}")
            self._at += 1
            found[key] = self.value()
        return found

    def _list(self) -> list[Any]:
        found = []
        while not self._closes("]"):
            found.append(self.value())
        return found

    def _closes(self, bracket: str) -> bool:
        """Whether the list or object ends here; else the next item does not."""
        if self._text[self._at] in "{[" and self._text[self._at] == {"}": "{", "]": "["}[bracket]:
            self._at += 1
            self._skip()
        else:
            self._skip()
            if self._text[self._at] == ",":
                self._at += 1
                self._skip()
        if self._text[self._at] == bracket:
            self._at += 1
            return True
        return False

    def _string(self, quote: str) -> str:
        start = self._at + len(quote)
        end = self._text.index(quote, start)
        self._at = end + len(quote)
        return self._text[start:end]

    def _word(self) -> str:
        match = _BARE.match(self._text, self._at)
        if match is None:
            raise ValueError(f"no value at {self._at}")
        self._at = match.end()
        return match[0]

    def _skip(self) -> None:
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1


def _bare(word: str) -> Any:
    """A number or constant; any other word is a string that came without its quotes."""
    try:
        value = json.loads(word)
    except ValueError:
        return word
    return value if value is None or isinstance(value, bool | int | float) else word
