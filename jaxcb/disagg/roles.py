"""Who computes a prompt: the rules, as plain functions of the load."""

from __future__ import annotations

from jaxcb.request import Request


def needs_one_engine(request: Request) -> bool:
    """What is asked for of the prompt itself (its embedding, its log-probabilities) stays where the answer is made."""
    return request.pooling is not None or request.sampling.prompt_logprobs is not None


def is_short(request: Request, page_size: int) -> bool:
    """A prompt of a page or less goes in a decode step's shadow: to hand it over would cost more than to compute it."""
    return len(request.prompt_token_ids) <= page_size


def takes_prompts(*, decode_is_idle: bool, backlog_tokens: int, step_tokens: int) -> bool:
    """Roles follow the load: a decode engine with nothing to do computes a prompt itself, in chunks, when those that
    prefill have more than a full step before them.

    Arguments:
        backlog_tokens: prompt tokens that the least busy prefill engine has taken on.
        step_tokens: the token budget of a step.
    """
    return decode_is_idle and backlog_tokens > step_tokens
