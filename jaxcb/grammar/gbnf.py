"""GBNF, llama.cpp's notation of grammars, as Lark: llguidance's own converter, with characters put as it takes them.

It copies strings and classes as they stand into strings and regexes of other rules: there ``&&``, ``~~`` and ``--`` in
a class are operators, which would let through what the class leaves out, ``.`` is no line break, and ``\\u`` is another
escape.
"""

from __future__ import annotations

import re

from llguidance import gbnf_to_lark

from jaxcb.errors import RequestError

_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_PART = re.compile(r'#[^\r\n]*|"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|\.', re.DOTALL)
_CHARACTER = re.compile(r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\.|.", re.DOTALL)
_NAMED = {r"\n": "\n", r"\r": "\r", r"\t": "\t"}
_ANY = "[\\x00-\U0010ffff]"


def is_gbnf(text: str) -> bool:
    """Whether it has a rule of GBNF."""
    return _RULE.search(text) is not None


def lark_of(text: str, kind: str) -> str:
    """The same grammar in Lark's notation. ``kind`` is the field of ``structured_outputs`` that it is from.

    Raises:
        RequestError: it is not GBNF.
    """
    try:
        return gbnf_to_lark.gbnf_to_lark(_PART.sub(_plain, text))
    except Exception as error:  # a parser from outside: whatever it raises refuses this request
        param = f"structured_outputs.{kind}"
        raise RequestError(f"{param} is not GBNF: {error}", param=param) from error


def _plain(part: re.Match[str]) -> str:
    """A comment, string, class or ``.`` with characters that mean the same in Lark's strings and classes."""
    text = part.group()
    if text == ".":
        return _ANY
    if text[0] == '"':
        return '"' + "".join(map(_escaped, _CHARACTER.findall(text[1:-1]))) + '"'
    if text[0] != "[":
        return text
    negated = text.startswith("[^")
    members = _CHARACTER.findall(text[2 if negated else 1 : -1])
    between = range(1, len(members) - 1)
    ranges: set[int] = set()
    for index in between:  # a-z: a dash between two members that are not of a range before
        if members[index] == "-" and index - 2 not in ranges and index - 1 not in ranges:
            ranges.add(index)
    return "[^"[: 1 + negated] + "".join("-" if i in ranges else _escaped(c) for i, c in enumerate(members)) + "]"


def _escaped(character: str) -> str:
    """As a code below 128 (letters and digits as they are), or as itself above."""
    if len(character) > 2:
        value = chr(int(character[2:], 16))
    else:
        value = _NAMED.get(character, character)
        if value.startswith("\\") and len(value) == 2:
            if value[1] not in '"\\[]':
                return value  # for the converter to refuse
            value = value[1]
    return value if value.isalnum() or ord(value) > 127 or value == " " else f"\\x{ord(value):02x}"
