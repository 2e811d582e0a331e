"""Compilers over small tokenizers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jaxcb.grammar import GrammarCompiler
from tests.grammar.walk import VOCABULARY
from tests.text.small_tokenizers import byte_fallback, byte_level


@pytest.fixture(scope="session", params=["byte_level", "byte_fallback"])
def compiler(request: pytest.FixtureRequest) -> Iterator[GrammarCompiler]:
    """Of a vocabulary with ids that no token has, as models pad it. Id 1 or 2 is </s>."""
    tokenizer = {"byte_level": byte_level, "byte_fallback": byte_fallback}[request.param]()
    eos = tokenizer.backend.token_to_id("</s>")
    made = GrammarCompiler(tokenizer, VOCABULARY, [eos])
    yield made
    made.close()
