"""Characters of a GBNF grammar mean what llama.cpp says that they mean."""

from __future__ import annotations

import pytest

from jaxcb.errors import RequestError
from jaxcb.grammar import GrammarCompiler

from .walk import accepts, compiled


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ("root ::= .", ["a", "\n", "é", "\U0001f600"], ["", "ab"]),
        (r'root ::= "\u0041\u00e9\U0001F600\x42\n\t\"\\"', ['Aé\U0001f600B\n\t"\\'], ["A"]),
        (r"root ::= [\u4e00-\u9fff]+ [\x41-\x43]", ["中文B"], ["中", "B"]),
        ("root ::= [^a&&b]", ["c"], ["a", "b", "&"]),
        ("root ::= [^!--b]", ["c", "."], ["!", "+", "-", "b"]),
        ("root ::= [a~~b]", ["a", "b", "~"], ["c"]),
        ("root ::= [+--]", ["+", ",", "-"], ["*", "."]),
        ("root ::= [a-c-e]", ["b", "-", "e"], ["d"]),
        ("root ::= [-a]", ["-", "a"], ["b"]),
        (r"root ::= [\]\\^[-] [/]", ["]/", "\\/", "^/", "[/", "-/"], ["a/"]),
        (r'root ::= [^"\\\x7F\x00-\x1F]', ["a", " "], ['"', "\x7f", "\n", "\\"]),
        ('root ::= "{x}" | "#y" | "//z" | "[a.b]" # "no" .\n', ["{x}", "#y", "//z", "[a.b]"], ["no"]),
        ('root ::= e\ne ::= t ("+" t)*\nt ::= n | "(" e ")"\nn ::= [0-9]+', ["1+(2+3)", "12"], ["1+", "(1"]),
        ('root ::= ("a" |\n  "b"){2} c?\nc ::= "c"', ["ab", "abc"], ["a"]),
    ],
)
def test_a_grammar_accepts_what_it_says(
    compiler: GrammarCompiler, grammar: str, good: list[str], bad: list[str]
) -> None:
    made = compiled(compiler, grammar=grammar)
    assert [text for text in good if not accepts(compiler, made, text)] == []
    assert [text for text in bad if accepts(compiler, made, text)] == []


@pytest.mark.parametrize("grammar", [r"root ::= [\d]", 'root ::= "a', r'root ::= "\u12"', "root ::= [a", "root ::= b"])
def test_what_is_not_gbnf_is_refused(compiler: GrammarCompiler, grammar: str) -> None:
    with pytest.raises(RequestError, match="GBNF"):
        compiled(compiler, grammar=grammar)
