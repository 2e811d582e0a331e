from __future__ import annotations

import pytest

from jaxcb.errors import RequestError
from jaxcb.sampling_params import DRY_BREAKERS, MAX_BAD_WORD_TOKENS
from jaxcb.text.words import bad_word_ids, breaker_ids
from tests.text.small_tokenizers import byte_level

TOKENIZER = byte_level()


@pytest.mark.parametrize("word", ["the", " the"])
def test_a_bad_word_is_banned_at_the_beginning_of_a_word_and_inside_of_one(word):
    inside, after_a_space = bad_word_ids(TOKENIZER, [word])
    assert TOKENIZER.decode(inside) == "the" and TOKENIZER.decode(after_a_space) == " the"
    assert len(after_a_space) == 1 and len(inside) == 2, "the space is part of another token"


def test_a_sequence_of_tokens_is_banned_once_however_often_it_is_named():
    assert bad_word_ids(TOKENIZER, ["a", " a", "a"]) == [TOKENIZER.encode("a"), TOKENIZER.encode(" a")]
    assert bad_word_ids(TOKENIZER, [" "]) == [TOKENIZER.encode(" ")]
    assert bad_word_ids(TOKENIZER, []) == []


def test_a_bad_word_of_too_many_tokens_is_named():
    bad_word_ids(TOKENIZER, ["x" * (MAX_BAD_WORD_TOKENS - 1)])
    with pytest.raises(RequestError, match="'xxxxxxxx' has 9 tokens, at most 8") as error:
        bad_word_ids(TOKENIZER, ["x" * MAX_BAD_WORD_TOKENS])  # with a space before it
    assert error.value.param == "bad_words"


def test_a_breaker_is_the_token_that_ends_it_in_running_text():
    assert breaker_ids(TOKENIZER, DRY_BREAKERS) == [TOKENIZER.encode(text)[0] for text in DRY_BREAKERS]
    assert breaker_ids(TOKENIZER, ["x the", " the", "he"]) == [
        TOKENIZER.encode(" the")[0],
        TOKENIZER.encode("he")[0],
    ]
