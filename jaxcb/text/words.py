"""Token ids of the strings that sampling looks at: bad words and DRY's sequence breakers."""

from __future__ import annotations

from collections.abc import Sequence

from jaxcb.errors import RequestError
from jaxcb.sampling_params import MAX_BAD_WORD_TOKENS
from jaxcb.text.tokenizer import Tokenizer


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """The ways in which each word is written: as a word of its own (after a space) and inside of one.

    Raises:
        RequestError: a word has more than ``MAX_BAD_WORD_TOKENS`` tokens.
    """
    sequences: list[list[int]] = []
    for word in words:
        for text in (word.lstrip() or word, " " + word.lstrip()):
            ids = tokenizer.encode(text, add_special_tokens=False)
            if len(ids) > MAX_BAD_WORD_TOKENS:
                raise RequestError(
                    f"bad_words: {word!r} has {len(ids)} tokens, at most {MAX_BAD_WORD_TOKENS} are supported",
                    param="bad_words",
                )
            if ids and ids not in sequences:
                sequences.append(ids)
    return sequences


def breaker_ids(tokenizer: Tokenizer, breakers: Sequence[str]) -> list[int]:
    """The token with which each breaker ends when it follows a letter, as it does in running text."""
    ids = [tokenizer.encode("a" + breaker, add_special_tokens=False)[-1] for breaker in breakers]
    return list(dict.fromkeys(ids))
