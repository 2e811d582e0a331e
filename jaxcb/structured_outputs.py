"""StructuredOutputs: the language that an answer has to be in. Names and meanings follow vLLM's."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxcb import validation
from jaxcb.errors import RequestError

MAX_BYTES = 1 << 20
"""Of a schema, grammar, regex or all choices, as UTF-8."""
MAX_REGEX_BYTES = 1 << 14
MAX_DEPTH = 128
"""Levels of nesting in a schema, and of brackets in a grammar or regex."""
MAX_CHOICES = 4096
KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """What the text of an answer must be. Exactly one of the first six is given.

    Arguments:
        json: a JSON schema; the answer is a document that it allows. Properties come in the schema's order.
        json_object: any JSON object.
        regex: a regular expression (Rust's syntax) that matches the whole answer.
        choice: one of these strings.
        grammar: a grammar in Lark's notation (begins at ``start``) or in GBNF, llama.cpp's EBNF (``root ::= ...``).
            As llguidance reads it: a terminal takes as much text as it can, and gives none back to what follows.
        structural_tag: free text and constrained pieces. ``{"format": {"type": ...}}`` is xgrammar's tree of formats
            (const_string, json_schema, grammar, regex, any_text; sequence, or, optional, plus, star, repeat; tag,
            triggered_tags, tags_with_separator, dispatch); ``{"structures": [{"begin", "schema", "end"}, ...],
            "triggers": [...]}`` is the older notation of triggered_tags.
        whitespace_pattern: with ``json`` or ``json_object``: a regex of the whitespace between two elements, instead of
            any of at most 64 characters.
        disable_any_whitespace: with these: no whitespace at all.
        reasoning_end: the answer begins with free text that ends with this marker (``"</think>"``, say); what comes
            after it is constrained. For models that think before they answer.

    Raises:
        RequestError: not exactly one is given, or a value has the wrong type, or is too large or nested too deeply;
            ``.param`` names it.
    """

    json: Mapping[str, Any] | str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    structural_tag: Mapping[str, Any] | str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    reasoning_end: str | None = None

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace"):
            validation.boolean(_param(name), getattr(self, name))
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs takes exactly one of {', '.join(KINDS)}, got {' and '.join(given) or 'none'}",
                param="structured_outputs",
            )
        for name, most in (
            ("regex", MAX_REGEX_BYTES),
            ("grammar", MAX_BYTES),
            ("whitespace_pattern", MAX_REGEX_BYTES),
            ("reasoning_end", 256),
        ):
            if (value := getattr(self, name)) is not None:
                _check_text(name, value, most)
        for name in ("regex", "grammar", "whitespace_pattern"):
            _check_depth(name, _bracket_depth(getattr(self, name) or ""))
        for name in ("json", "structural_tag"):
            self._set(name, _document(name, getattr(self, name)))
        self._set("choice", _choices(self.choice))
        if self.json is None and not self.json_object:
            for name in ("whitespace_pattern", "disable_any_whitespace"):
                if getattr(self, name):
                    raise RequestError(f"{_param(name)} goes with json or json_object alone", param=_param(name))
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise RequestError(
                "structured_outputs takes whitespace_pattern or disable_any_whitespace, not both",
                param=_param("whitespace_pattern"),
            )

    @classmethod
    def of(cls, value: object) -> StructuredOutputs | None:
        """``value`` if it is one or None, else made from a mapping of its fields.

        Raises:
            RequestError: it is something else, or has a field that there isn't.
        """
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise RequestError(
                f"structured_outputs must be an object, got {validation.shown(value)}", param="structured_outputs"
            )
        names = {field.name for field in dataclasses.fields(cls)}
        for name in value:
            if name not in names:
                raise RequestError(
                    f"structured_outputs has no field {name!r}; its fields are {', '.join(sorted(names))}",
                    param=f"structured_outputs.{name}"[:200],
                )
        return cls(**{name: given for name, given in value.items() if given is not None})

    @property
    def kind(self) -> str:
        """Which one is given."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def key(self) -> str:
        """Equal for equal ones; to look them up by."""
        return json.dumps(dataclasses.asdict(self))

    def _set(self, name: str, value: object) -> None:
        """For __post_init__ alone: the checked value takes the place of the given one."""
        object.__setattr__(self, name, value)


def _param(name: str) -> str:
    return f"structured_outputs.{name}"


def _check_text(name: str, value: object, most: int) -> None:
    param = _param(name)
    if not isinstance(value, str) or not value:
        raise RequestError(f"{param} must be a non-empty string, got {validation.shown(value)}", param=param)
    _check_size(name, value, most)


def _check_size(name: str, text: str, most: int) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise RequestError(f"{_param(name)} holds half of a surrogate pair", param=_param(name)) from error
    if size > most:
        raise RequestError(f"{_param(name)} has {size:,} bytes, at most {most:,} are supported", param=_param(name))


def _check_depth(name: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise RequestError(
            f"{_param(name)} is nested more than {MAX_DEPTH} levels deep, which is the most that is supported",
            param=_param(name),
        )


def _document(name: str, value: object) -> dict[str, Any] | None:
    """A JSON object, given as one or as its text; a copy of our own, which holds nothing but JSON."""
    if value is None:
        return None
    param = _param(name)
    try:
        text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
        _check_size(name, text, MAX_BYTES)
        _check_depth(name, _bracket_depth(text))
        document = json.loads(text)
    except RequestError:
        raise
    except RecursionError:
        _check_depth(name, MAX_DEPTH + 1)
        raise
    except (ValueError, TypeError) as error:
        raise RequestError(f"{param} is not JSON: {error}", param=param) from error
    if not isinstance(document, dict):
        raise RequestError(f"{param} must be a JSON object, got {validation.shown(document)}", param=param)
    return document


def _bracket_depth(text: str) -> int:
    """Most brackets that are open at once. Those in strings count too: that errs on the safe side."""
    depth = deepest = 0
    for char in text:
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}" and depth:
            depth -= 1
    return deepest


def _choices(value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    param = _param("choice")
    if isinstance(value, str | bytes) or not isinstance(value, Sequence) or not value:
        raise RequestError(f"{param} must be a list of strings, got {validation.shown(value)}", param=param)
    if len(value) > MAX_CHOICES:
        raise RequestError(f"{param} holds {len(value)} strings, at most {MAX_CHOICES} are supported", param=param)
    for text in value:
        _check_text("choice", text, MAX_BYTES)
    _check_size("choice", "".join(value), MAX_BYTES)
    return tuple(value)
