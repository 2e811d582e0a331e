"""Random answers: a model that takes any token that it may."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from jaxcb.grammar import Grammar, GrammarCompiler, Masks
from jaxcb.grammar.constraint import Constraint
from jaxcb.structured_outputs import StructuredOutputs

VOCABULARY = 400
"""More ids than the small tokenizers know."""


def allowed_ids(constraint: Constraint, ahead: int = 0) -> list[int]:
    """What may be sampled as the answer's next token, or ``ahead`` forced tokens later."""
    [mask] = Masks(VOCABULARY).fill([(constraint, constraint.position + ahead)], VOCABULARY)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[:VOCABULARY]).tolist()


def walk(
    grammar: Grammar,
    compiler: GrammarCompiler,
    rng: random.Random,
    *,
    takes_forced: bool,
    most: int = 400,
    avoid: Sequence[int] = (),
) -> tuple[str, bool]:
    """The text of a random answer, and whether it came to its end within ``most`` tokens."""
    eos = compiler._eos_ids
    constraint = grammar.constraint(eos, takes_forced=takes_forced)
    ids: list[int] = []
    while len(ids) < most and not constraint.ended:
        assert constraint.error is None
        choices = allowed_ids(constraint)
        assert choices, "nothing may follow, and it has not ended"
        chosen = rng.choice([token for token in choices if token not in avoid] or choices)
        if eos[0] in choices and rng.random() < 0.3:
            chosen = eos[0]
        if chosen in eos:
            assert constraint.complete
            break
        ids.append(chosen)
        constraint.advance([chosen])
    text = compiler._tokenizer.decode(ids, skip_special_tokens=False)
    return text, constraint.ended or constraint.complete


def compiled(compiler: GrammarCompiler, **fields: object) -> Grammar:
    return compiler.compile(StructuredOutputs(**fields))  # type: ignore[arg-type]  # a test's fields


def accepts(compiler: GrammarCompiler, grammar: Grammar, text: str) -> bool:
    """Whether a text is a whole answer."""
    if grammar.marker is not None:
        _, found, text = text.partition(grammar.marker.text.decode())
        if not found:
            return False
    matcher = grammar.matcher.deep_copy()
    return matcher.consume_tokens(compiler._llguidance_tokenizer().tokenize_str(text)) and matcher.is_accepting()
