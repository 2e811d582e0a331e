"""What masks allow is the language, token by token, whatever comes of it."""

from __future__ import annotations

import json
import random
import re

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcb.grammar import GrammarCompiler, Masks
from tests.text.small_tokenizers import byte_level

from .schemas import SCHEMAS
from .walk import VOCABULARY, accepts, allowed_ids, compiled, walk


def ids_of(compiler: GrammarCompiler, text: str) -> list[int]:
    return compiler._llguidance_tokenizer().tokenize_str(text)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32), takes_forced=st.booleans())
def test_random_answers_are_valid_under_random_schemas(
    compiler: GrammarCompiler, schema: dict[str, object], seed: int, takes_forced: bool
) -> None:
    grammar = compiled(compiler, json=schema, disable_any_whitespace=seed % 2 == 0)
    text, ended = walk(grammar, compiler, random.Random(seed), takes_forced=takes_forced)
    if ended:
        jsonschema.validate(json.loads(text), schema)
        assert accepts(compiler, grammar, text)


@pytest.mark.parametrize("takes_forced", [False, True])
@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"regex": r"(ab|cd){1,3}-\d+"}, r"(ab|cd){1,3}-\d+"),
        ({"regex": r"^https?://[a-z]{1,5}$"}, r"https?://[a-z]{1,5}"),
        ({"choice": ("yes", "no (really)", "a|b", "日本\n")}, r"yes|no \(really\)|a\|b|日本\n"),
        ({"grammar": 'start: "x" NUM ("," NUM)*\nNUM: /[0-9]{1,2}/'}, r"x\d{1,2}(,\d{1,2})*"),
        ({"grammar": 'root ::= "x" num ("," num)*\nnum ::= [0-9] [0-9]?'}, r"x\d{1,2}(,\d{1,2})*"),
    ],
    ids=["regex", "anchors", "choice", "lark", "gbnf"],
)
def test_random_answers_match(
    compiler: GrammarCompiler, fields: dict[str, object], pattern: str, takes_forced: bool
) -> None:
    grammar = compiled(compiler, **fields)
    ends = 0
    for seed in range(6):
        text, ended = walk(grammar, compiler, random.Random(seed), takes_forced=takes_forced)
        if ended:
            ends += 1
            assert re.fullmatch(pattern, text), (seed, text)
            assert accepts(compiler, grammar, text)
    assert ends


def test_json_object_is_any_object(compiler: GrammarCompiler) -> None:
    grammar = compiled(compiler, json_object=True)
    assert accepts(compiler, grammar, '{"a": [1, {"b": null}]}')
    assert not accepts(compiler, grammar, "[1]") and not accepts(compiler, grammar, '{"a": 1')


def test_whitespace_is_what_the_pattern_says(compiler: GrammarCompiler) -> None:
    """vllm#38696, omlx#2990: a model wrote blanks until its tokens were spent."""
    schema = {"type": "array", "items": {"type": "integer"}}
    for count, whole in ((64, True), (65, False), (200, False)):
        assert accepts(compiler, compiled(compiler, json=schema), f"[1,{' ' * count}2]") is whole
    assert accepts(compiler, compiled(compiler, json=schema), "[1,\n\n 2]")
    assert not accepts(compiler, compiled(compiler, json=schema, disable_any_whitespace=True), "[1, 2]")
    grammar = compiled(compiler, json=schema, whitespace_pattern=" ?")
    assert accepts(compiler, grammar, "[1, 2]") and not accepts(compiler, grammar, "[1,  2]")


def test_end_tokens_may_come_where_the_answer_is_complete_and_nowhere_else(compiler: GrammarCompiler) -> None:
    eos = compiler._eos_ids
    stop = ids_of(compiler, "z")[0]
    constraint = compiled(compiler, regex="az?b*").constraint([*eos, stop], takes_forced=False)
    a, b = ids_of(compiler, "a")[0], ids_of(compiler, "b")[0]
    assert allowed_ids(constraint) == [a]
    constraint.advance([a])
    allowed = allowed_ids(constraint)
    assert {*eos, b, stop} <= set(allowed)  # the stop id ends here, though the regex has it too
    assert {compiler._tokenizer.decode([token]) for token in allowed} <= {"", "b", "z"}
    assert constraint.complete and not constraint.ended


def test_an_end_token_that_does_not_end_the_answer_never_comes(compiler: GrammarCompiler) -> None:
    constraint = compiled(compiler, regex="ab?").constraint([], takes_forced=False)
    constraint.advance(ids_of(compiler, "a"))
    assert constraint.complete
    assert {compiler._tokenizer.decode([token]) for token in allowed_ids(constraint)} == {"b"}
    constraint.advance(ids_of(compiler, "b"))
    assert constraint.ended


def test_a_model_without_an_end_token_goes_on_as_long_as_the_language_does() -> None:
    """The tokenizer has one, with which llguidance would end an answer; to the model it is a token like any other."""
    tokenizer = byte_level()
    endless = GrammarCompiler(tokenizer, VOCABULARY, [])
    constraint = compiled(endless, regex="b*").constraint([], takes_forced=False)
    b = tokenizer.encode("b")
    assert constraint.complete and allowed_ids(constraint) == b
    endless.close()


def test_forced_tokens_come_one_after_the_other_and_then_the_choice(compiler: GrammarCompiler) -> None:
    constraint = compiled(compiler, regex="hello (x|y)").constraint([], takes_forced=True)
    forced = list(constraint.forced)
    assert compiler._tokenizer.decode(forced).strip() == "hello"
    assert [allowed_ids(constraint, ahead) for ahead in range(len(forced))] == [[token] for token in forced]
    assert len(allowed_ids(constraint, len(forced))) > 1
    for token in forced:
        assert constraint.next_forced(constraint.position) == token
        assert not constraint.complete
        constraint.advance([token])
    assert constraint.forced == []


def test_free_text_ends_with_the_marker_and_not_before(compiler: GrammarCompiler) -> None:
    grammar = compiled(compiler, regex="ab", reasoning_end="</t>")
    eos = compiler._eos_ids
    constraint = grammar.constraint(eos, takes_forced=True)
    for token in ids_of(compiler, "so</</t"):
        assert constraint.forced == []
        assert not set(eos) & set(allowed_ids(constraint)), "the answer can't end in its free text"
        constraint.advance([token])
    assert len(allowed_ids(constraint)) > 200
    constraint.advance(ids_of(compiler, ">"))
    assert compiler._tokenizer.decode(constraint.forced) == "ab"
    assert accepts(compiler, grammar, "what </ t> ever</t>ab") and not accepts(compiler, grammar, "ab")


def test_a_token_that_runs_past_the_marker_is_forbidden(compiler: GrammarCompiler) -> None:
    the = compiler._tokenizer.backend.token_to_id("he")
    constraint = compiled(compiler, regex="x", reasoning_end="th").constraint([], takes_forced=True)
    assert the in allowed_ids(constraint)
    constraint.advance(ids_of(compiler, "t")[-1:])
    assert the not in allowed_ids(constraint)


def test_structural_tags_leave_text_free_and_hold_tags_to_their_schema(compiler: GrammarCompiler) -> None:
    tag = {
        "structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}],
        "triggers": ["<f="],
    }
    grammar = compiled(compiler, structural_tag=tag)
    assert accepts(compiler, grammar, "call <f=a>12</f> and <f=a>3</f>") and accepts(compiler, grammar, "no < call")
    assert not accepts(compiler, grammar, "call <f=b>12</f>") and not accepts(compiler, grammar, "call <f=a>x</f>")


def test_a_tokenizer_that_knows_more_ids_than_the_model_is_cut_to_the_model_s() -> None:
    tokenizer = byte_level()
    small = GrammarCompiler(tokenizer, 100, [1])
    constraint = compiled(small, regex="[a-z]+").constraint([1], takes_forced=False)
    mask = Masks(tokenizer.vocab_size).fill([(constraint, 0)], 100)
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    assert tokenizer.decode(allowed[allowed < 100].tolist()) == "abcdefghijklmnopqrstuvwxyz"
    assert mask.shape == (1, 4)
    small.close()
