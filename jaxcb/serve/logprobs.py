"""Log-probabilities in OpenAI's two forms: a list of objects for chats, parallel lists for completions."""

from __future__ import annotations

from collections.abc import Sequence
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
    """An echoed prompt's first token has null: nothing came before it."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]

    @property
    def end_offset(self) -> int:
        """Where the next token's text begins."""
        return self.text_offset[-1] + len(self.tokens[-1]) if self.tokens else 0


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""vLLM's form: for each token of the prompt the log-probabilities of the token itself and of the likeliest, by id."""


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
    top: list[dict[str, float] | None] | None = None
    if values.top_ids.shape[1]:
        top = [
            _by_text(ids.tolist(), _finite(logprobs), tokenizer)
            for ids, logprobs in zip(values.top_ids, values.top_logprobs, strict=True)
        ]
    own: list[float | None] = [*_finite(values.logprobs)]
    return TextLogprobs(tokens=tokens, token_logprobs=own, top_logprobs=top, text_offset=offsets)


def _by_text(ids: Sequence[int], logprobs: Sequence[float], tokenizer: Tokenizer) -> dict[str, float]:
    """The likeliest tokens, likeliest first. Where several read alike (parts of characters do), the first of them."""
    found: dict[str, float] = {}
    for token_id, logprob in zip(ids, logprobs, strict=True):
        found.setdefault(_text(tokenizer.token_bytes(token_id)), logprob)
    return found


def echoed_logprobs(
    prompt_ids: Sequence[int], values: Logprobs | None, answer: Logprobs | None, tokenizer: Tokenizer
) -> TextLogprobs:
    """For a prompt and what follows it. ``values``: of the prompt from its second token on; None: it has no second."""
    first = _text(tokenizer.token_bytes(prompt_ids[0]))
    offset, parts = len(first), []
    for piece in (values, answer):
        if piece and (part := text_logprobs(piece, tokenizer, offset)) is not None:
            offset = part.end_offset
            parts.append(part)
    tops = [part.top_logprobs for part in parts if part.top_logprobs is not None]
    return TextLogprobs(
        tokens=[first, *(token for part in parts for token in part.tokens)],
        token_logprobs=[None, *(value for part in parts for value in part.token_logprobs)],
        top_logprobs=[None, *(top for tops_of_part in tops for top in tops_of_part)] if tops else None,
        text_offset=[0, *(offset for part in parts for offset in part.text_offset)],
    )


def prompt_logprobs(values: Logprobs | None, tokenizer: Tokenizer) -> PromptLogprobs:
    """``values`` are of the prompt from its second token on; None: it has no second."""
    result: PromptLogprobs = [None]
    values = Logprobs.none() if values is None else values
    for i, token_id in enumerate(values.token_ids.tolist()):
        ids = [token_id, *values.top_ids[i].tolist()]
        logprobs = _finite(np.append(values.logprobs[i], values.top_logprobs[i]))
        ranks = [int(values.ranks[i]), *range(1, len(ids))]
        result.append(
            {
                other: PromptLogprob(logprob=logprob, rank=rank, decoded_token=_text(tokenizer.token_bytes(other)))
                for other, logprob, rank in zip(reversed(ids), reversed(logprobs), reversed(ranks), strict=True)
            }
        )
    return result


def _top(token_id: int, logprob: float, tokenizer: Tokenizer) -> TopLogprob:
    own = tokenizer.token_bytes(token_id)
    return TopLogprob(token=_text(own), logprob=logprob, bytes=list(own))


def _text(own: bytes) -> str:
    return own.decode(errors="replace")


def _finite(values: np.ndarray) -> list[float]:
    return np.maximum(values, LOWEST).tolist()
