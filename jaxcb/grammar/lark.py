"""Lark: a grammar in llguidance's notation, put together from pieces.

What is regular becomes one terminal, for between two of them llguidance gives the first as much as it can take. Free
text up to an end is a terminal as well: what ends with it, and has none before. So no text can be read in two ways:

    start: T0                                        "<t>", any text, "</t>"
    T0: "<t>" (ANY "</t>" & ~(ANY "</t>" SOME))
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence

_HEAD = "%llguidance {}\nANY: /(?s:.*)/\nSOME: /(?s:.+)/\n"


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of the grammar, with no alternatives or operators but in brackets."""

    text: str
    regular: bool = True
    """It can stand in a terminal."""
    open: bool = False
    """Free text stands at its end: nothing could be told from what comes after it."""
    empty: bool = False
    """It may be."""
    json_first: bool = False
    """It may begin with a JSON document."""
    json_last: bool = False
    json_twice: bool = False
    """It may hold two documents with nothing between, where llguidance would let whitespace in."""


NOTHING = Piece('""', empty=True)


class Lark:
    """One grammar. ``special_tokens`` are ids of the tokenizer's by their texts: where a string holds one, that very
    token is meant, and free text can't hold it."""

    def __init__(self, special_tokens: Mapping[str, int]):
        self._special = special_tokens
        texts = sorted((text for text in special_tokens if text), key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._terminals: dict[str, str] = {}
        """Names of those that stand in rules, by what they are."""
        self._side: list[dict[str, str]] = []

    def grammar(self, start: Piece) -> str:
        """llguidance's, in JSON."""
        rules = [f"start: {self._in_rule(start)}", *(f"{name}: {text}" for text, name in self._terminals.items())]
        lark = _HEAD + "".join(f"{rule}\n" for rule in rules)
        return json.dumps({"grammars": [{"name": "start", "lark_grammar": lark}, *self._side]})

    def other(self, lark: str) -> Piece:
        """A whole grammar as a piece of this one."""
        name = f"g{len(self._side)}"
        self._side.append({"name": name, "lark_grammar": lark})
        return Piece(f"@{name}", regular=False)

    def _in_rule(self, piece: Piece) -> str:
        if not piece.regular or piece == NOTHING:
            return piece.text
        return self._terminals.setdefault(piece.text, f"T{len(self._terminals)}")

    def joined(self, pieces: Iterable[Piece]) -> Piece:
        """One after the other; regular neighbours in one terminal."""
        runs = itertools.groupby(pieces, lambda piece: piece.regular)
        return functools.reduce(self._pair, (functools.reduce(self._pair, run) for _, run in runs), NOTHING)

    def _pair(self, one: Piece, other: Piece) -> Piece:
        if NOTHING in (one, other):
            return one if other == NOTHING else other
        regular = one.regular and other.regular
        texts = (one.text, other.text) if regular else (self._in_rule(one), self._in_rule(other))
        return Piece(
            " ".join(texts),
            regular=regular,
            open=other.open,
            empty=one.empty and other.empty,
            json_first=one.json_first or (one.empty and other.json_first),
            json_last=other.json_last or (other.empty and one.json_last),
            json_twice=one.json_twice or other.json_twice or (one.json_last and other.json_first),
        )

    def either(self, pieces: Sequence[Piece]) -> Piece:
        """One of them."""
        if len(pieces) == 1:
            return pieces[0]
        regular = all(piece.regular for piece in pieces)
        text = _one_of(piece.text if regular else self._in_rule(piece) for piece in pieces)
        names = ("open", "empty", "json_first", "json_last", "json_twice")
        return Piece(text, regular=regular, **{name: any(getattr(piece, name) for piece in pieces) for name in names})

    def literal(self, text: str) -> Piece:
        """A string, in which special tokens stand for themselves."""
        parts, at = [], 0
        for found in self._split.finditer(text) if self._split else ():
            parts += [
                _string(text[at : found.start()]),
                Piece(f"<[{self._special[found.group()]}]>", regular=False),
            ]
            at = found.end()
        return self.joined([*parts, _string(text[at:])])

    def closed(self, piece: Piece, ends: Sequence[str]) -> Piece:
        return self.joined([piece, self.either([self.literal(end) for end in ends])]) if ends else piece

    def text_without(self, texts: Iterable[str]) -> Piece:
        """Free text that holds none of these. It can't hold special tokens anyway."""
        never = [_quoted(text) for text in texts if self.literal(text).regular]
        return Piece(f"(ANY & ~(ANY {_one_of(never)} ANY))" if never else "ANY", open=True, empty=True)

    def text_up_to(self, ends: Sequence[str], without: Sequence[str] = ()) -> list[Piece]:
        """For each end, free text that ends with it and holds neither an end nor one of ``without`` before."""
        plain = [text for text in (*ends, *without) if self.literal(text).regular]
        pieces = []
        for end in ends:
            if end in plain:
                last = _quoted(end)
                pieces.append(Piece(f"(ANY {last} & ~(ANY {_one_of(map(_quoted, plain))} SOME))"))
                continue
            found = self._split.search(end) if self._split else None
            assert found is not None, "it holds a special token"
            before = self.text_without(plain)
            if found.start():
                before = Piece(f"({before.text} & ANY {_quoted(end[: found.start()])})")
            pieces.append(self.joined([before, self.literal(end[found.start() :])]))
        return pieces

    def times(self, piece: Piece, least: int, most: int | None) -> Piece:
        """A piece repeated; None: as often as one likes."""
        return dataclasses.replace(
            piece,
            text=f"({piece.text}){{{least},{'' if most is None else most}}}",
            open=False,
            empty=piece.empty or not least,
            json_twice=piece.json_twice or (piece.json_last and piece.json_first and most != 1),
        )


def _one_of(texts: Iterable[str]) -> str:
    unique = list(dict.fromkeys(texts))
    return unique[0] if len(unique) == 1 else f"({' | '.join(unique)})"


def _string(text: str) -> Piece:
    return Piece(_quoted(text)) if text else NOTHING


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
