"""SamplingParams: how a request's tokens are chosen and when it stops. Names and meanings follow vLLM's."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jaxcb import validation
from jaxcb.errors import RequestError
from jaxcb.structured_outputs import StructuredOutputs

__all__ = ["SamplingParams", "StructuredOutputs"]

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1000
"""Characters of a stop string."""
MAX_FORBIDDEN_IDS = 8
"""Ids that one row can forbid at once (its end tokens while ``min_tokens`` is not reached)."""
MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
"""Entries of ``logit_bias``."""
MAX_BAD_WORDS = 32
"""Strings; each is held as up to two sequences of tokens, with a space before it and without."""
MAX_BAD_WORD_TOKENS = 8
MAX_NGRAM = 32
"""Longest ``no_repeat_ngram_size``, and the longest repetition that DRY tells from longer ones."""
MAX_DRY_BREAKERS = 16
DRY_BREAKERS = ("\n", ":", '"', "*")
MAX_CHOICES = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop.

    The logits are changed in this order: ``allowed_token_ids``, ``bad_words``, ``min_tokens``, ``logit_bias``; the
    three penalties; ``no_repeat_ngram_size``, DRY; then the temperature; then tokens are left out by ``top_n_sigma``,
    ``min_p``, ``top_k``, ``top_p``, ``typical_p``, XTC.

    Arguments:
        n: answers to the same prompt, each drawn by itself. They share the prompt's computation and KV pages.
        best_of: draw so many answers and give back the ``n`` with the highest mean log-probability a token.
        temperature: 0 (or anything below 1e-5) is greedy. Default 1.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches ``top_p``; 0 keeps one.
        min_p: leave out tokens less likely than ``min_p`` times the likeliest.
        typical_p: keep the tokens whose surprise is closest to the expected one, up to this probability
            (Meister et al. 2023); 1 keeps all.
        top_n_sigma: keep logits within so many standard deviations of the largest (Tang et al. 2024); 0 or -1 is off.
        repetition_penalty: logits of tokens in the prompt or the answer are divided (if positive) or multiplied by it.
        presence_penalty: taken off the logits of tokens in the answer. The prompt doesn't count.
        frequency_penalty: the same, times the number of occurrences in the answer.
        no_repeat_ngram_size: no n-gram of this size occurs twice in prompt and answer; 0 is off.
        dry_multiplier: DRY: a token that would extend a repetition of n tokens loses
            ``dry_multiplier * dry_base ** (n - dry_allowed_length)``; 0 is off.
        dry_base, dry_allowed_length: see there.
        dry_sequence_breakers: strings across which DRY sees no repetition.
        xtc_probability: XTC: chance, a token, of leaving out all but the least likely of the tokens above
            ``xtc_threshold``; 0 is off.
        xtc_threshold: see there; above 0.5 it never acts.
        logit_bias: added to the logits of these ids, in [-100, 100].
        allowed_token_ids: only these can be sampled.
        bad_words: strings that are never generated, at the beginning of a word or inside.
        seed: an integer makes the draws reproducible: token ``i`` of a choice depends on (seed, choice, i) alone, never
            on the neighbours in the batch. None draws a fresh seed for the request.
        max_tokens: most tokens to generate; None means "up to the context limit".
        min_tokens: end tokens and stop strings are ignored until this many tokens were generated.
        stop: strings that end the generation; they are not part of the returned text.
        stop_token_ids: ids that end the generation.
        ignore_eos: go on after the model's end-of-sequence ids.
        include_stop_str_in_output: keep the stop string that ended the generation in the text.
        skip_special_tokens: leave special tokens out of the text.
        logprobs: give the log-probability of each token, and of so many most likely ones, 0 to 20; -1: of all of them.
        prompt_logprobs: the same for the tokens of the prompt, from the second on; always of the model's own logits.
            The whole prompt is computed for them, once for each of ``n`` answers, whatever the prefix cache holds.
        structured_outputs: the language that the text must be in. Then end tokens end the answer only where it is
            complete, and where the language allows nothing more the answer ends, whatever ``min_tokens`` and
            ``ignore_eos`` say. A ``stop`` string ends it wherever it comes.
        extra_args: for the engine's own logits processors (:class:`jaxcb.logits_processor.LogitsProcessor`).

    Raises:
        RequestError: a value is outside its range; ``.param`` names the field.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_sequence_breakers: tuple[str, ...] = DRY_BREAKERS
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None
    extra_args: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, low, high in _NUMBERS:
            self._set(name, validation.number(name, getattr(self, name), low=low, high=high))
        for name, least, most in _INTEGERS:
            if getattr(self, name) is not None or name not in _OPTIONAL:
                self._set(name, validation.integer(name, getattr(self, name), low=least, high=most))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            validation.boolean(name, getattr(self, name))
        for name, count in _STRINGS:
            self._set(name, _strings(name, getattr(self, name), count))
        self._set("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        self._set("logit_bias", _biases(self.logit_bias))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _ids("allowed_token_ids", self.allowed_token_ids))
        if self.extra_args is not None and not isinstance(self.extra_args, Mapping):
            given = validation.shown(self.extra_args)
            raise RequestError(f"extra_args must be a mapping of names, got {given}", param="extra_args")
        self._set("structured_outputs", StructuredOutputs.of(self.structured_outputs))
        self._check_together()

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must be at most max_tokens, got {self.min_tokens} > {self.max_tokens}", param="min_tokens"
            )
        if len(self.stop_token_ids) > MAX_FORBIDDEN_IDS:
            raise RequestError(
                f"stop_token_ids holds {len(self.stop_token_ids)} ids, at most {MAX_FORBIDDEN_IDS} are supported",
                param="stop_token_ids",
            )
        if self.allowed_token_ids == ():
            raise RequestError("allowed_token_ids is empty: no token could be sampled", param="allowed_token_ids")
        if self.repetition_penalty == 0.0:
            raise RequestError("repetition_penalty must be above 0, got 0", param="repetition_penalty")
        if self.typical_p == 0.0:
            raise RequestError("typical_p must be in (0, 1], got 0", param="typical_p")
        if self.best_of is not None and self.best_of < self.n:
            raise RequestError(f"best_of must be at least n, got {self.best_of} < {self.n}", param="best_of")
        if self.greedy and self.num_choices > 1:
            raise RequestError(
                f"temperature is {self.temperature:g}, so all {self.num_choices} answers would be the same: ask for "
                "one, or raise the temperature",
                param="n" if self.n > 1 else "best_of",
            )

    def _set(self, name: str, value: object) -> None:
        """For __post_init__ alone: the checked value takes the place of the given one."""
        object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """True when the most likely token is taken and no random number is used."""
        return self.temperature < 1e-5

    @property
    def num_choices(self) -> int:
        """Sequences that the request runs as."""
        return self.n if self.best_of is None else self.best_of

    @functools.cached_property
    def tier(self) -> int:
        """The cheapest :class:`jaxcb.sampling.Tier` that honours all of this."""
        if self.controlled:
            return 3
        if self.greedy:
            return 0
        return 2 if self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0 else 1

    @functools.cached_property
    def controlled(self) -> bool:
        """Something is asked for that looks at the tokens so far, at single ids, or at the whole distribution."""
        return (
            self.typical_p < 1.0
            or self.top_n_sigma > 0.0
            or self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.no_repeat_ngram_size > 0
            or self.dry_multiplier > 0.0
            or self.xtc_probability > 0.0
            or self.logit_bias is not None
            or self.allowed_token_ids is not None
            or bool(self.bad_words)
        )


_NUMBERS = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("typical_p", 0.0, 1.0),
    ("top_n_sigma", -1.0, 1000.0),
    ("repetition_penalty", 0.0, 100.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("dry_multiplier", 0.0, 100.0),
    ("dry_base", 1.0, 10.0),
    ("xtc_probability", 0.0, 1.0),
    ("xtc_threshold", 0.0, 1.0),
)
_INTEGERS: tuple[tuple[str, int, int | None], ...] = (
    ("n", 1, MAX_CHOICES),
    ("best_of", 1, MAX_CHOICES),
    ("top_k", -1, None),
    ("no_repeat_ngram_size", 0, MAX_NGRAM),
    ("dry_allowed_length", 1, MAX_NGRAM),
    ("seed", -MAX_SEED - 1, MAX_SEED),
    ("max_tokens", 1, None),
    ("min_tokens", 0, None),
    ("logprobs", -1, MAX_LOGPROBS),
    ("prompt_logprobs", -1, MAX_LOGPROBS),
)
_OPTIONAL = frozenset({"best_of", "seed", "max_tokens", "logprobs", "prompt_logprobs"})
_STRINGS = (
    ("stop", MAX_STOP_STRINGS),
    ("bad_words", MAX_BAD_WORDS),
    ("dry_sequence_breakers", MAX_DRY_BREAKERS),
)


def _strings(name: str, value: object, most: int) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Sequence) or isinstance(value, bytes | bytearray):
        raise RequestError(f"{name} must be a string or a list of strings, got {validation.shown(value)}", param=name)
    if len(value) > most:
        raise RequestError(f"{name} holds {len(value)} strings, at most {most} are supported", param=name)
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


def _biases(value: object) -> Mapping[int, float] | None:
    """Ids may come as strings, as in JSON."""
    if value is None or value == {}:
        return None
    if not isinstance(value, Mapping):
        raise RequestError(
            f"logit_bias must map token ids to numbers, got {validation.shown(value)}", param="logit_bias"
        )
    if len(value) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias holds {len(value)} entries, at most {MAX_LOGIT_BIAS} are supported", param="logit_bias"
        )
    biases = {}
    for key, bias in value.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
        token = validation.integer("logit_bias", token, low=0, high=2**31 - 1)
        biases[token] = validation.number("logit_bias", bias, low=-100.0, high=100.0)
    return biases
