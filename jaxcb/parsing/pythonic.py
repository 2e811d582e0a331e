"""Calls as Python writes them, ``[f(a=1, b="x"), g()]``: Llama 4, some of Llama 3.2, Gemma 3 inside a code block."""

from __future__ import annotations

import ast
import json
from typing import Any

from jaxcb.parsing.events import Sink

BEGIN = "<|python_start|>"
_MAX_DEPTH = 32
"""Brackets inside each other: the limit of what Python's own parser is asked to read."""
_JSON_NAMES = {"true": True, "false": False, "null": None}


class PythonicParser:
    """A list of calls, as the whole answer or at its beginning. A call is given on when its bracket closes."""

    def __init__(self, sink: Sink):
        self._sink = sink
        self._head: str | None = ""
        """What was read before the first call; None once the answer is text."""
        self._scan: CallScan | None = None

    def feed(self, text: str) -> None:
        for at, char in enumerate(text):
            if self._scan is not None:
                self._in_list(self._scan, char)
            elif self._head is not None:
                self._in_head(char)
            else:
                self._sink.text(text[at:])
                return

    def finish(self) -> None:
        self._sink.text((self._head or "") + (self._scan.raw if self._scan is not None else ""))

    def _in_head(self, char: str) -> None:
        head = (self._head or "") + char
        solid = head.strip().removeprefix(BEGIN).lstrip()
        if solid == "[":
            self._head, self._scan = "", CallScan(head)
        elif not solid or BEGIN.startswith(solid):
            self._head = head
        else:
            self._head = None
            self._sink.text(head)

    def _in_list(self, scan: CallScan, char: str) -> None:
        text = scan.take(char)
        if text is not None:
            call = read_call(text)
            if call is None or call[0] not in self._sink.names:
                scan.broken = True
            else:
                self._sink.call(call[0])
                self._sink.arguments(call[1])
                scan.forget()
        if scan.broken:
            self._sink.text(scan.raw)
        if scan.broken or scan.ended:
            self._scan, self._head = None, None


class CallScan:
    """Sees where the calls of a list end."""

    def __init__(self, raw: str):
        self._raw = [raw]
        self.broken = False
        self.ended = False
        self._call: list[str] = []
        self._depth = 0
        self._quote = ""
        self._escaped = False

    @property
    def raw(self) -> str:
        """What was read since the last call."""
        return "".join(self._raw)

    def forget(self) -> None:
        """The last call was one: it won't be needed as text."""
        self._raw.clear()

    def take(self, char: str) -> str | None:
        """The text of a call, if ``char`` is its last."""
        self._raw.append(char)
        if self._quote:
            self._call.append(char)
            self._in_string(char)
            return None
        if not self._call and char in " \t\r\n,":
            return None
        if not self._call and char == "]":
            self.ended = True
            return None
        self._call.append(char)
        if char in "([{":
            self._depth += 1
        elif char in ")]}":
            self._depth -= 1
        elif char in "\"'":
            self._quote = char
        if not self._depth and char == ")":
            call, self._call = "".join(self._call), []
            return call
        in_name = not self._depth and char not in ")]}"
        self.broken = self._depth > _MAX_DEPTH or self._depth < 0 or (in_name and not self._is_name())
        return None

    def _is_name(self) -> bool:
        return "".join(self._call).strip().replace(".", "_").isidentifier()

    def _in_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == self._quote:
            self._quote = ""


def read_call(text: str) -> tuple[str, str] | None:
    """(name, arguments as JSON) of ``name(key=value, ...)`` with literal values; None for anything else."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
        if not isinstance(node, ast.Call) or node.args or any(word.arg is None for word in node.keywords):
            return None
        values = {word.arg: _literal(word.value) for word in node.keywords}
        return ast.unparse(node.func), json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr) -> Any:
    """The value of a literal; JSON's names of constants are understood too."""
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {
            ast.literal_eval(key): _literal(value) for key, value in zip(node.keys, node.values, strict=True) if key
        }
    return ast.literal_eval(node)
