"""What a structural tag accepts is what its description says, and what it can't hold to it refuses by name."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from jaxcb.errors import RequestError
from jaxcb.grammar import Grammar, GrammarCompiler

from .tag_oracle import accepted
from .walk import accepts, allowed_ids, compiled, walk

DIGIT = {"type": "json_schema", "json_schema": {"type": "integer", "minimum": 0, "maximum": 9}}
TEXT = {"type": "any_text"}


def tag(begin: str, content: dict[str, Any], end: str | list[str]) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def calls(**fields: Any) -> dict[str, Any]:
    tags = [tag("<f=a>", DIGIT, "</f>"), tag("<f=b>", const("xy"), "")]
    return {"type": "triggered_tags", "triggers": ["<f="], "tags": tags, **fields}


def grammar_of(compiler: GrammarCompiler, wanted: dict[str, Any]) -> Grammar:
    return compiled(compiler, structural_tag={"type": "structural_tag", "format": wanted})


def grammar_or_reject(compiler: GrammarCompiler, wanted: dict[str, Any]) -> Grammar:
    """Of a random tag that can be held to. Hypothesis fails a test that rejects too many."""
    try:
        return grammar_of(compiler, wanted)
    except RequestError:
        reject()


FORMATS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (const('a"b\\\x7f/é\n'), ['a"b\\\x7f/é\n'], ["a", ""]),
    (DIGIT, ["1"], ["x", " 1", "1 "]),
    ({"type": "regex", "pattern": "^a/+$"}, ["a//"], ["a", "a/b"]),
    ({"type": "grammar", "grammar": 'root ::= "b" | "c"'}, ["b", "c"], ["a", "bc"]),
    ({"type": "grammar", "grammar": 'start: "b" | "c"'}, ["b", "c"], ["a", "bc"]),
    ({"type": "any_text", "excludes": ["zz"]}, ["", "zaz"], ["zz", "azzb"]),
    (tag("<t>", TEXT, ["</t", "</t>"]), ["<t></t", "<t>x</t"], ["<t>x</t>"]),
    (tag("<t>", TEXT, ["</t>", "</u>"]), ["<t></t>", "<t>x</u>", "<t></t</t>"], ["<t>x</u></t>", "<t>"]),
    (
        {"type": "sequence", "elements": [tag("<t>", TEXT, "</t>"), DIGIT]},
        ["<t>x</t>1", "<t></t>1"],
        ["<t>x</t>", "1", "<t>x</t></t>1"],
    ),
    (calls(), ["", "<f", "hi <f=a>1</f> and <f=b>xyx"], ["<f=", "<f=a>x</f>", "<f=c>1</f>"]),
    (calls(at_least_one=True), ["<f=a>1</f> and <f=a>1</f>"], ["", "x<f=a>1</f>"]),
    (calls(stop_after_first=True), ["", "x", "x<f=a>1</f>"], ["<f=a>1</f> ", "<f=b>xyz"]),
    (calls(stop_after_first=True, at_least_one=True), ["<f=a>1</f>", "<f=b>xy"], ["", "x<f=a>1</f>"]),
    (calls(excludes=["no"]), ["n", "<f=b>xyn"], ["no", "ano<f=a>1</f>"]),
    (tag("<r>", calls(), "</r>"), ["<r></r>", "<r>x<f=a>1</f>y</r>"], ["<r>", "<r></r>x", "<r><f=</r>"]),
    (
        {
            "type": "tags_with_separator",
            "tags": [tag("<a>", DIGIT, "</a>"), tag("<b>", const("x"), "</b>")],
            "separator": ", ",
        },
        ["", "<a>1</a>", "<a>1</a>, <b>x</b>, <a>2</a>"],
        ["<a>1</a><b>x</b>", ", ", "<a>1</a>, "],
    ),
    (
        {
            "type": "tags_with_separator",
            "tags": [tag("<a>", DIGIT, "</a>")],
            "separator": "",
            "at_least_one": True,
            "stop_after_first": True,
        },
        ["<a>1</a>"],
        ["", "<a>1</a><a>1</a>"],
    ),
    ({"type": "star", "content": tag("<a>", DIGIT, "")}, ["", "<a>1<a>2"], ["<a>", "<a>1 ", "<a>1 <a>2"]),
    (
        {"type": "plus", "content": {"type": "or", "elements": [const("a"), tag("b", DIGIT, "")]}},
        ["a", "ab1a"],
        ["", "b 1"],
    ),
    ({"type": "repeat", "min": 2, "max": 3, "content": const("ab")}, ["abab", "ababab"], ["ab", "abababab"]),
    ({"type": "repeat", "min": 1, "max": -1, "content": const("1")}, ["1", "1111111"], [""]),
    (tag("(", {"type": "optional", "content": TEXT}, ")"), ["()", "(a)"], ["(", "())"]),
    (
        {"type": "dispatch", "rules": [["<n>", DIGIT], ["<m>", const("x")]], "loop": False},
        ["", "a<n>1", "<m>x"],
        ["<n>1b", "<m>1"],
    ),
    ({"type": "dispatch", "rules": [["<n>", DIGIT]]}, ["a<n>1b<n>2c"], ["<n>b"]),
]


@pytest.mark.parametrize(("wanted", "good", "bad"), FORMATS, ids=[str(i) for i in range(len(FORMATS))])
def test_each_format_accepts_what_it_describes_and_nothing_else(
    compiler: GrammarCompiler, wanted: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    grammar = grammar_of(compiler, wanted)
    assert [text for text in good if not accepts(compiler, grammar, text)] == []
    assert [text for text in bad if accepts(compiler, grammar, text)] == []


WORDS = st.text("<a>", min_size=1, max_size=3)
LEAVES = st.just(DIGIT) | WORDS.map(const) | st.just(TEXT)


def _tags(content: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(tag, WORDS, content, WORDS | st.lists(WORDS, min_size=1, max_size=2))


TRIGGERS = [["<"], ["a"], [">"], ["<a"], [">>"], ["<", ">"], ["a", "<"], ["<a", ">"], ["a", "<>"], ["<>", ">a"]]
"""None is a part of another, which is refused."""


def _triggered(content: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def of(triggers: list[str]) -> st.SearchStrategy[dict[str, Any]]:
        begun = st.builds(
            lambda tag, trigger: tag | {"begin": trigger + tag["begin"]}, _tags(content), st.sampled_from(triggers)
        )
        return st.fixed_dictionaries(
            {
                "type": st.just("triggered_tags"),
                "triggers": st.just(triggers),
                "tags": st.lists(begun, min_size=1, max_size=3),
                "at_least_one": st.booleans(),
                "stop_after_first": st.booleans(),
            }
        )

    return st.sampled_from(TRIGGERS).flatmap(of)


RANDOM = st.recursive(
    LEAVES,
    lambda inner: (
        _tags(inner)
        | _triggered(inner)
        | st.builds(lambda kind, content: {"type": kind, "content": content}, st.sampled_from(["star", "plus"]), inner)
        | st.builds(
            lambda kind, elements: {"type": kind, "elements": elements},
            st.sampled_from(["sequence", "or"]),
            st.lists(inner, min_size=1, max_size=3),
        )
    ),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(wanted=RANDOM, seed=st.integers(0, 2**32))
def test_what_a_random_tag_accepts_its_description_does(
    compiler: GrammarCompiler, wanted: dict[str, Any], seed: int
) -> None:
    """Random answers, and random texts of what the tags are made of."""
    grammar = grammar_or_reject(compiler, wanted)
    rng = random.Random(seed)
    texts = ["".join(rng.choices("<a>1", k=rng.randrange(9))) for _ in range(40)]
    for _ in range(3):
        text, ended = walk(grammar, compiler, rng, takes_forced=False, most=12)
        texts += [text] * (ended and "\N{REPLACEMENT CHARACTER}" not in text)
    for text in texts:
        if accepts(compiler, grammar, text):
            assert accepted(wanted, text), (seed, text)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(wanted=_triggered(LEAVES), seed=st.integers(0, 2**32))
def test_triggered_tags_accept_all_that_they_describe(
    compiler: GrammarCompiler, wanted: dict[str, Any], seed: int
) -> None:
    grammar = grammar_or_reject(compiler, wanted)
    rng = random.Random(seed)
    pieces = ["<", "a", ">", "1", *(text for tag in wanted["tags"] for text in (tag["begin"], *tag["end"]))]
    for _ in range(40):
        text = "".join(rng.choices(pieces, k=rng.randrange(7)))
        assert accepts(compiler, grammar, text) == accepted(wanted, text), (seed, text)


def test_special_tokens_stand_for_themselves(compiler: GrammarCompiler) -> None:
    """Text can't spell them: they end it, whatever it says."""
    bos = compiler._tokenizer.backend.token_to_id("<s>")
    text = compiler._llguidance_tokenizer().tokenize_str
    grammar = grammar_of(compiler, {"type": "sequence", "elements": [tag("<s>", TEXT, "!<s>"), DIGIT]})
    constraint = grammar.constraint(compiler._eos_ids, takes_forced=False)
    assert allowed_ids(constraint) == [bos]
    constraint.advance([bos, *text("what<s")])
    assert bos not in allowed_ids(constraint)
    constraint.advance(text("!"))
    assert bos in allowed_ids(constraint)
    constraint.advance([bos])
    assert {compiler._tokenizer.decode([token]).strip() for token in allowed_ids(constraint)} <= set("0123456789") | {
        ""
    }


def test_the_older_notation_means_triggered_tags(compiler: GrammarCompiler) -> None:
    """Blanks in it are bounded as in any JSON (vllm#38696)."""
    structures = [{"begin": "<f=a>", "schema": '{"type": "array"}', "end": "</f>"}]
    grammar = compiled(compiler, structural_tag={"structures": structures, "triggers": ["<f="]})
    for count, whole in ((64, True), (65, False)):
        assert accepts(compiler, grammar, f"so <f=a>[1,{' ' * count}2]</f>, done") is whole
    assert not accepts(compiler, grammar, "<f=a>{}</f>") and not accepts(compiler, grammar, "<f=b>")


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({"type": "qwen_xml_parameter", "json_schema": {}}, "format must be an object with one of the types any_text"),
        ({"type": "token", "token": 5}, "one of the types"),
        ({"type": "any_text", "max_tokens": 5}, "max_tokens is not supported"),
        ({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}, "style must be"),
        ({"type": "json_schema", "json_schema": {}, "any_order": True}, "any_order is not supported"),
        ({"type": "json_schema", "json_schema": {"not": {}}}, "not"),
        ({"type": "json_schema", "json_schema": {"x-guidance": {"lenient": True}}}, "x-guidance"),
        ({"type": "json_schema"}, r"format\.json_schema is missing"),
        ({"type": "const_string", "value": 3}, r"format\.value must be a string"),
        ({"type": "regex", "pattern": "("}, "regex"),
        ({"type": "grammar", "grammar": "root ::= ("}, "GBNF"),
        ({"type": "sequence", "elements": []}, r"format\.elements must be a list that is not empty"),
        ({"type": "sequence", "elements": [TEXT, DIGIT]}, r"elements\[0\] is free text"),
        ({"type": "sequence", "elements": [DIGIT, {"type": "optional", "content": const("x")}, DIGIT]}, "two JSON"),
        ({"type": "star", "content": DIGIT}, "two JSON"),
        ({"type": "star", "content": TEXT}, "can't be repeated"),
        ({"type": "repeat", "min": 3, "max": 2, "content": DIGIT}, "above its max"),
        ({"type": "repeat", "min": 0, "max": 10**9, "content": DIGIT}, "max must be"),
        ({"type": "tag", "begin": "a", "content": DIGIT}, r"format\.end is missing"),
        ({"type": "tag", "begin": {"type": "token", "token": 1}, "content": DIGIT, "end": ""}, "begin must be"),
        (calls(triggers=["<f=", "<g="]), "with which no tag begins"),
        (calls(triggers=["<g="]), "starts with none of the triggers"),
        (calls(triggers=["<f=", "<f=b"]), "must not hold each other"),
        (calls(tags=[tag("<f=", TEXT, "")]), "give it an end"),
        (calls(tags=["<f="]), r"tags\[0\] must be a tag"),
        (calls(tags=[tag("<f=ab", DIGIT, "."), tag("<f=a", TEXT, ".")]), r"tags\[0\]\.begin begins with .*tags\[1\]"),
        (
            {"type": "tags_with_separator", "separator": ",", "tags": [tag("<a", DIGIT, ""), tag("<", DIGIT, "")]},
            r"tags\[0\]\.begin begins with .*tags\[1\]",
        ),
        (tag("<a>", DIGIT, ["<<>", "<"]), r"format\.end holds '<' and '<<>', which begins with it"),
        (calls(tags=[tag("<f=", DIGIT, ["<", "<<"])]), r"tags\[0\]\.end holds '<' and '<<'"),
        (calls(at_least_one=1), "at_least_one must be true or false"),
        (tag("(", calls(), "<"), "must not hold each other"),
        ({"type": "dispatch", "rules": [["a"]]}, r"rules\[0\] must be"),
    ],
)
def test_what_can_not_be_held_to_is_refused_by_name(
    compiler: GrammarCompiler, wanted: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RequestError, match=reason) as error:
        grammar_of(compiler, wanted)
    assert error.value.param == "structured_outputs.structural_tag"
