"""What a client asks for and what it gets back. No jax here: these types cross the whole engine."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from jaxcb import validation
from jaxcb.errors import RequestError

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1000
"""Characters of a stop string."""
MAX_FORBIDDEN_IDS = 8
"""Ids that one row can forbid at once (its end tokens while ``min_tokens`` is not reached)."""
MAX_SEED = 2**63 - 1


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
class SamplingParams:
    """How tokens are chosen and when to stop. Names and meanings follow vLLM's.

    Arguments:
        temperature: 0 (or anything below 1e-5) is greedy. Default 1.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches ``top_p``; in (0, 1].
        seed: an integer makes the draw reproducible: token ``i`` depends on (seed, position) alone, never on the
            neighbours in the batch. None draws a fresh seed for the request.
        max_tokens: most tokens to generate; None means "up to the context limit".
        min_tokens: end tokens and stop strings are ignored until this many tokens were generated.
        stop: strings that end the generation; they are not part of the returned text.
        stop_token_ids: ids that end the generation.
        ignore_eos: go on after the model's end-of-sequence ids.
        include_stop_str_in_output: keep the stop string that ended the generation in the text.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        RequestError: a value is outside its range; ``.param`` names the field.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._set("stop", _strings("stop", self.stop))
        self._set("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        self._set("temperature", validation.number("temperature", self.temperature, low=0.0, high=100.0))
        self._set("top_p", validation.number("top_p", self.top_p, low=0.0, high=1.0))
        self._set("top_k", validation.integer("top_k", self.top_k, low=-1))
        self._set("min_tokens", validation.integer("min_tokens", self.min_tokens, low=0))
        if self.top_p == 0.0:
            raise RequestError("top_p must be in (0, 1], got 0", param="top_p")
        if self.seed is not None:
            self._set("seed", validation.integer("seed", self.seed, low=-MAX_SEED - 1, high=MAX_SEED))
        if self.max_tokens is not None:
            self._set("max_tokens", validation.integer("max_tokens", self.max_tokens, low=1))
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens must be at most max_tokens, got {self.min_tokens} > {self.max_tokens}",
                    param="min_tokens",
                )
        if len(self.stop_token_ids) > MAX_FORBIDDEN_IDS:
            raise RequestError(
                f"stop_token_ids holds {len(self.stop_token_ids)} ids, at most {MAX_FORBIDDEN_IDS} are supported",
                param="stop_token_ids",
            )
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            validation.boolean(name, getattr(self, name))

    def _set(self, name: str, value: object) -> None:
        """For __post_init__ alone: the checked value takes the place of the given one."""
        object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """True when the most likely token is taken and no random number is used."""
        return self.temperature < 1e-5


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
    num_cached_tokens: int = 0
    """Prompt tokens that came out of the prefix cache."""
    num_preemptions: int = 0
    arrival_s: float = 0.0
    first_token_s: float | None = None
    finished_s: float | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


def _strings(name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Sequence) or isinstance(value, bytes | bytearray):
        raise RequestError(f"{name} must be a string or a list of strings, got {validation.shown(value)}", param=name)
    if len(value) > MAX_STOP_STRINGS:
        raise RequestError(f"{name} holds {len(value)} strings, at most {MAX_STOP_STRINGS} are supported", param=name)
    for text in value:
        if not isinstance(text, str) or not text:
            raise RequestError(f"{name} must hold non-empty strings, got {validation.shown(text)}", param=name)
        if len(text) > MAX_STOP_LENGTH:
            raise RequestError(
                f"{name} holds a string of {len(text)} characters, at most {MAX_STOP_LENGTH} are supported", param=name
            )
    return tuple(value)


def _ids(name: str, value: object) -> tuple[int, ...]:
    ids = () if value is None else validation.token_ids(name, value)
    return tuple(validation.integer(name, token, low=0, high=2**31 - 1) for token in ids)
