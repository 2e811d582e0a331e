"""What a client asks for and what it gets back. No jax here: these types cross the whole engine."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
from jaxtyping import Float

from jaxcb import validation
from jaxcb.errors import RequestError
from jaxcb.logprobs import Logprobs
from jaxcb.sampling_params import SamplingParams

__all__ = ["FinishReason", "Request", "RequestOutput", "SamplingParams", "best_choices"]


Pooling = Literal["last", "mean"]


class FinishReason(enum.StrEnum):
    """Why a sequence ended. The values are those of the OpenAI API, except ``abort``."""

    STOP = "stop"
    """An end-of-sequence id, a stop id or a stop string."""
    LENGTH = "length"
    """``max_tokens`` or the context limit was reached."""
    ABORT = "abort"
    """The client left or the engine was asked to drop the request."""
    ERROR = "error"
    """The engine failed while the request was running."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to continue. ``prompt_token_ids`` are used exactly as given; a list of our own is kept.

    Raises:
        RequestError: a field has the wrong type; ``.param`` names it.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    arrival_s: float = 0.0
    """Seconds on the clock of ``time.monotonic()``."""
    priority: float = 0
    """Lower goes first, under ``policy="priority"``."""
    tenant: str = ""
    """Whose request it is, under ``policy="fair"``."""
    ttft_deadline_s: float | None = None
    """Seconds from the arrival within which the first token is wanted, under ``policy="deadline"``."""
    cache_salt: str = ""
    """Prefix pages are shared only between requests with the same salt."""
    score_from: int = 1
    """With ``sampling.prompt_logprobs``: the first position of the prompt whose log-probability is wanted. What stands
    before it may come out of the prefix cache."""
    pooling: Pooling | None = None
    """The prompt's embedding is wanted: its last token's final hidden state, or the mean of all."""
    bad_word_ids: Sequence[Sequence[int]] = ()
    """Token ids of ``sampling.bad_words``; the engine fills them in."""
    dry_breaker_ids: Sequence[int] = ()
    """Token ids of ``sampling.dry_sequence_breakers``; the engine fills them in."""
    processor_states: Sequence[Any] = ()
    """One for each logits processor of the engine's, which fills them in; None where it leaves the request alone."""

    def __post_init__(self) -> None:
        if not isinstance(self.request_id, str) or not self.request_id:
            raise RequestError(
                f"request_id must be a non-empty string, got {validation.shown(self.request_id)}", param="request_id"
            )
        if not isinstance(self.sampling, SamplingParams):
            raise RequestError(
                f"sampling must be a SamplingParams, got {validation.shown(self.sampling)}", param="sampling"
            )
        object.__setattr__(self, "prompt_token_ids", validation.token_ids("prompt", self.prompt_token_ids))
        if self.pooling not in (None, *get_args(Pooling)):
            raise RequestError(
                f'pooling must be "last" or "mean", got {validation.shown(self.pooling)}', param="pooling"
            )
        validation.integer("score_from", self.score_from, low=1)

    @property
    def num_reusable(self) -> int:
        """Tokens at the beginning of the prompt of which nothing but the KV is needed."""
        if self.pooling == "mean":
            return 0
        return len(self.prompt_token_ids) if self.sampling.prompt_logprobs is None else self.score_from - 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """The result of a request, or (``finish_reason`` None) its state so far.

    ``text`` and ``token_ids`` are cumulative; ``new_text`` and ``new_token_ids`` hold what this update added, and
    concatenate to the former over a stream. Times are seconds on the clock of ``time.monotonic()``.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    text: str
    new_token_ids: Sequence[int] = ()
    new_text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop id or stop string that ended the sequence, if one did; None for an end-of-sequence id."""
    error: str | None = None
    engine_failed: bool = False
    """The error is the engine's, not one that the request made itself."""
    num_cached_tokens: int = 0
    """Prompt tokens that came out of the prefix cache."""
    num_preemptions: int = 0
    arrival_s: float = 0.0
    first_token_s: float | None = None
    finished_s: float | None = None
    index: int = 0
    """Which of the request's ``n`` answers this is."""
    prompt_logprobs: Logprobs | None = None
    """Of the prompt's tokens from the second (or ``score_from``) on, if they were asked for; with the first output."""
    embedding: Float[np.ndarray, "E"] | None = dataclasses.field(default=None, repr=False)
    """Of the prompt, if ``pooling`` asked for it; not normalised."""
    logprobs_parts: Sequence[Logprobs] | None = dataclasses.field(default=None, repr=False)
    new_logprobs_parts: Sequence[Logprobs] | None = dataclasses.field(default=None, repr=False)
    score: float | None = None
    """What a beam search ranks its answers by."""
    choices: Sequence[RequestOutput] = dataclasses.field(default=(), repr=False)
    """All ``n`` answers, on the first one that ``generate`` returns."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def logprobs(self) -> Logprobs | None:
        """Of ``token_ids``, if they were asked for."""
        return None if self.logprobs_parts is None else Logprobs.concatenate(self.logprobs_parts)

    @property
    def new_logprobs(self) -> Logprobs | None:
        """Of ``new_token_ids``, if they were asked for."""
        return None if self.new_logprobs_parts is None else Logprobs.concatenate(self.new_logprobs_parts)


def best_choices(choices: Sequence[RequestOutput], sampling: SamplingParams) -> list[RequestOutput]:
    """The ``n`` answers that a request is given back, by index: all, or with ``best_of`` the likeliest first (by mean
    log-probability of a token, so that length doesn't decide)."""
    if sampling.best_of is None:
        return list(choices)
    ranked = sorted(choices, key=_mean_logprob, reverse=True)[: sampling.n]
    asked = sampling.logprobs is not None
    return [
        dataclasses.replace(choice, index=index, logprobs_parts=choice.logprobs_parts if asked else None)
        for index, choice in enumerate(ranked)
    ]


def _mean_logprob(choice: RequestOutput) -> float:
    logprobs = choice.logprobs
    return float(logprobs.logprobs.mean()) if logprobs is not None and len(logprobs) else -math.inf
