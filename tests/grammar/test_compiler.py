"""What is refused, and what a hostile grammar costs."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import llguidance
import pytest

from jaxcb.errors import RequestError
from jaxcb.grammar import GrammarCompiler
from jaxcb.grammar import compiler as compiler_module
from jaxcb.structured_outputs import StructuredOutputs

from .walk import allowed_ids, compiled


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"json": {"not": {"type": "string"}}}, "not"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"type": "string", "format": "never-heard-of"}}, "never-heard-of"),
        ({"json": {"type": "strin"}}, "strin"),
        ({"json": {"$ref": "http://somewhere/else"}}, "somewhere"),
        ({"json": {"type": "integer", "minimum": 2, "maximum": 1}}, "minimum"),
        ({"json": {"x-guidance": {"lenient": True}, "not": {}}}, "x-guidance"),
        ({"json": {"type": "array", "x-guidance": {"item_separator": ";"}}}, "x-guidance"),
        ({"regex": "(a"}, "regex"),
        ({"regex": "(?=a)b"}, "look-a"),
        ({"grammar": "start: nowhere"}, "nowhere"),
        ({"grammar": "root ::= ("}, "GBNF"),
        ({"grammar": 'start: x "b"\nx[stop="q"]: /[a-z]*/'}, "stop"),
        ({"grammar": "start: x\nx[capture, temperature=0.5]: /a/"}, "temperature"),
        ({"structural_tag": {"format": {}}}, "format"),
        ({"structural_tag": {"structures": [{"begin": "x", "schema": "{", "end": "y"}], "triggers": ["x"]}}, "JSON"),
        ({"structural_tag": {"structures": [{"begin": "x", "end": "y"}], "triggers": ["z"]}}, "triggers"),
        ({"regex": "(a{1000}){1000}"}, "too"),
    ],
)
def test_what_can_not_be_held_to_is_refused_with_the_reason(
    compiler: GrammarCompiler, fields: dict[str, object], reason: str
) -> None:
    with pytest.raises(RequestError, match=reason) as error:
        compiled(compiler, **fields)
    assert error.value.param == f"structured_outputs.{next(iter(fields))}"


def test_a_grammar_that_takes_too_long_is_refused_and_others_go_on(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, release = threading.Event(), threading.Event()
    real = compiler_module.source_of

    def slow(wanted: StructuredOutputs, special: object) -> str:
        if wanted.regex == "slow":
            started.set()
            release.wait(30)
        return real(wanted, ())

    monkeypatch.setattr(compiler_module, "source_of", slow)
    monkeypatch.setattr(compiler_module, "TIMEOUT_S", 0.2)
    with pytest.raises(RequestError, match="takes more than"):
        compiled(compiler, regex="slow")
    assert started.is_set()
    compiled(compiler, regex="quick")
    release.set()
    monkeypatch.setattr(compiler_module, "TIMEOUT_S", 10.0)
    compiled(compiler, regex="slow")  # it was compiled meanwhile


def test_what_is_only_warned_of_is_refused_too(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning says that the language is not quite the one that was asked for."""
    matcher = SimpleNamespace(
        validate_grammar_with_warnings=lambda *args, **limits: (False, ["'spam' is ignored"]),
        grammar_from_regex=llguidance.LLMatcher.grammar_from_regex,
    )
    names = {"LLMatcher": matcher, "LLTokenizer": llguidance.LLTokenizer, "LLParserLimits": llguidance.LLParserLimits}
    monkeypatch.setattr(compiler_module, "llguidance", SimpleNamespace(**names))
    with pytest.raises(RequestError, match="'spam' is ignored"):
        compiled(compiler, regex="warned?")


def test_too_many_at_once_are_refused(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_QUEUED", 0)
    with pytest.raises(RequestError, match="try again"):
        compiled(compiler, regex="q{1,3}")


def test_an_equal_one_is_compiled_once(compiler: GrammarCompiler) -> None:
    first = compiled(compiler, json={"type": "array"})
    assert compiled(compiler, json='{"type": "array"}') is first
    assert compiled(compiler, json={"type": "array"}, whitespace_pattern=" ") is not first


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "(a|b)*a(a|b){300}"},
        {"regex": "(.{1,900}.{1,900}){1,900}"},
        {"grammar": "start: a a a a\na: b b b b | a a\nb: /x/ | a b | "},
        {"json": {"type": "string", "maxLength": 100_000}},
        {"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(500)}}},
        {"choice": tuple(f"choice number {i}" for i in range(4000))},
        {"regex": "(" * 120 + "a" + ")" * 120},
    ],
    ids=["exponential", "counted", "ambiguous", "long string", "many properties", "many choices", "deep"],
)
def test_hostile_grammars_cost_little_or_are_refused(compiler: GrammarCompiler, fields: dict[str, object]) -> None:
    """Ten times what they take here: this guards against seconds, not against a busy machine."""
    started = time.process_time()
    try:
        grammar = compiled(compiler, **fields)
    except RequestError:
        return
    finally:
        assert time.process_time() - started < 20
    constraint = grammar.constraint([], takes_forced=True)
    for _ in range(3):
        started = time.process_time()
        choices = allowed_ids(constraint, len(constraint.forced))
        assert time.process_time() - started < 2
        if constraint.error is not None or not choices:  # it has failed, or is complete
            return
        constraint.advance([*constraint.forced, choices[0]])
