"""What a request is given before it is queued: token ids of its words, a seed, a request of its own for each answer."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from jaxcb.errors import RequestError
from jaxcb.logits_processor import LogitsProcessor, check_extra_args, start_states
from jaxcb.request import Request
from jaxcb.text import Tokenizer
from jaxcb.text.words import bad_word_ids, breaker_ids

SEED_STEP = 0x9E3779B97F4A7C15
"""Between the seeds of a request's answers (the odd constant of SplitMix64: no two of 2^64 fall together)."""


def with_words_and_states(request: Request, tokenizer: Tokenizer, processors: Sequence[LogitsProcessor]) -> Request:
    """With what the sampler needs beside the parameters.

    Raises:
        RequestError: a word has too many tokens, or a logits processor refuses the request.
    """
    return with_processor_states(with_words(request, tokenizer), processors)


def with_words(request: Request, tokenizer: Tokenizer) -> Request:
    """With the token ids of what the sampler looks for."""
    sampling = request.sampling
    if not sampling.bad_words and not sampling.dry_multiplier:
        return request
    return dataclasses.replace(
        request,
        bad_word_ids=bad_word_ids(tokenizer, sampling.bad_words),
        dry_breaker_ids=breaker_ids(tokenizer, sampling.dry_sequence_breakers),
    )


def with_processor_states(request: Request, processors: Sequence[LogitsProcessor]) -> Request:
    """With the states that the engine's logits processors start from.

    Raises:
        RequestError: one of them refuses the request.
    """
    check_extra_args(processors, request.sampling.extra_args)
    if not processors:
        return request
    states = start_states(processors, request.sampling.extra_args, request.prompt_token_ids)
    return dataclasses.replace(request, processor_states=states)


def with_seed(request: Request, seeds: random.Random) -> Request:
    """A request that brings no seed is given one, so that a preemption can't change its answer."""
    if request.sampling.greedy or request.sampling.seed is not None:
        return request
    sampling = dataclasses.replace(request.sampling, seed=seeds.getrandbits(63))
    return dataclasses.replace(request, sampling=sampling)


def check_single(request: Request) -> None:
    """Raise RequestError if a request asks for several answers."""
    count = request.sampling.num_choices
    if count > 1:
        raise RequestError(
            f"{count} answers are asked for, and this call gives one: use jaxcb.generate.generate, or submit_choices",
            param="n" if request.sampling.best_of is None else "best_of",
        )


def prompt_only(request: Request) -> Request:
    """The request that computes the prompt and samples the first token of the first answer, as the request itself
    would. Stop strings are left to whoever goes on."""
    first = _choice_of(request, 0)
    sampling = dataclasses.replace(first.sampling, max_tokens=1, min_tokens=min(first.sampling.min_tokens, 1), stop=())
    return dataclasses.replace(first, sampling=sampling)


def choices_of(request: Request) -> list[Request]:
    """The requests of all answers, ``n`` or ``best_of`` of them."""
    return [_choice_of(request, index) for index in range(request.sampling.num_choices)]


def _choice_of(request: Request, index: int) -> Request:
    """The request of one answer. Its seed follows from the request's and the index, so each can be had again."""
    sampling = request.sampling
    if sampling.num_choices == 1:
        return request
    seed = ((sampling.seed or 0) + index * SEED_STEP + 2**63) % 2**64 - 2**63  # the first has the request's own
    wanted = sampling.logprobs if sampling.best_of is None else sampling.logprobs or 0  # to choose the best
    own = dataclasses.replace(sampling, n=1, best_of=None, seed=seed, logprobs=wanted)
    return dataclasses.replace(request, sampling=own)
