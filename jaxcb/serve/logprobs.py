"""Log-probabilities in OpenAI's two forms: a list of objects for chats, parallel lists for completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from jaxcb.logprobs import Logprobs

if TYPE_CHECKING:
    from jaxcb.text import Tokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON doesn't have."""


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """``token`` may be half a character, shown as U+FFFD; ``bytes`` is exact."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, frozen=True, kw_only=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    content: list[TokenLogprob]
    refusal: None = None


class TextLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


def chat_logprobs(values: Logprobs | None, tokenizer: Tokenizer) -> ChatLogprobs | None:
    """For the tokens of an answer, or of a piece of one."""
    if values is None:
        return None
    content = []
    for i, token_id in enumerate(values.token_ids.tolist()):
        top = [
            _top(other, logprob, tokenizer)
            for other, logprob in zip(values.top_ids[i].tolist(), _finite(values.top_logprobs[i]), strict=True)
        ]
        own = tokenizer.token_bytes(token_id)
        [logprob] = _finite(values.logprobs[i : i + 1])
        content.append(TokenLogprob(token=_text(own), logprob=logprob, bytes=list(own), top_logprobs=top))
    return ChatLogprobs(content=content)


def text_logprobs(values: Logprobs | None, tokenizer: Tokenizer, offset: int = 0) -> TextLogprobs | None:
    """The same for a completion; ``offset`` is the number of characters before."""
    if values is None:
        return None
    tokens = [_text(tokenizer.token_bytes(token_id)) for token_id in values.token_ids.tolist()]
    offsets = [offset, *(offset + np.cumsum([len(token) for token in tokens])).tolist()][: len(tokens)]
    top = None
    if values.top_ids.shape[1]:
        top = [
            {
                _text(tokenizer.token_bytes(token_id)): logprob
                for token_id, logprob in zip(ids.tolist(), _finite(logprobs), strict=True)
            }
            for ids, logprobs in zip(values.top_ids, values.top_logprobs, strict=True)
        ]
    return TextLogprobs(tokens=tokens, token_logprobs=_finite(values.logprobs), top_logprobs=top, text_offset=offsets)


def _top(token_id: int, logprob: float, tokenizer: Tokenizer) -> TopLogprob:
    own = tokenizer.token_bytes(token_id)
    return TopLogprob(token=_text(own), logprob=logprob, bytes=list(own))


def _text(own: bytes) -> str:
    return own.decode(errors="replace")


def _finite(values: np.ndarray) -> list[float]:
    return np.maximum(values, LOWEST).tolist()
