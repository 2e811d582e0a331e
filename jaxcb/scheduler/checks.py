"""What can never run is refused when it is added. Reads only limits, so any thread may call it."""

from __future__ import annotations

from jaxcb import validation
from jaxcb.errors import RequestError
from jaxcb.request import Request
from jaxcb.sampling_params import MAX_FORBIDDEN_IDS
from jaxcb.scheduler.knobs import SchedulerLimits

MAX_NAME_LENGTH = 1000
"""Characters of a tenant's name or a salt: both are kept."""


def check_request(request: Request, limits: SchedulerLimits, end_ids: frozenset[int]) -> None:
    """Refuse an impossible request.

    Raises:
        RequestError: ``.param`` names the field.
    """
    _check_length(request, limits)
    sampling = request.sampling
    if sampling.min_tokens and len(end_ids) > MAX_FORBIDDEN_IDS:
        raise RequestError(
            f"min_tokens can hold back at most {MAX_FORBIDDEN_IDS} end tokens; stop_token_ids and the model's own "
            f"are {len(end_ids)}",
            param="min_tokens",
        )
    validation.number("priority", request.priority, low=-1e9, high=1e9)
    validation.number("arrival_s", request.arrival_s, low=-1e12, high=1e12)
    if request.ttft_deadline_s is not None:
        validation.number("ttft_deadline_s", request.ttft_deadline_s, low=1e-6, high=1e9)
    for name, text in (("tenant", request.tenant), ("cache_salt", request.cache_salt)):
        if not isinstance(text, str) or len(text) > MAX_NAME_LENGTH:
            raise RequestError(
                f"{name} must be a string of at most {MAX_NAME_LENGTH} characters, got {validation.shown(text)}",
                param=name,
            )


def _check_length(request: Request, limits: SchedulerLimits) -> None:
    num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
    if num_prompt == 0:
        raise RequestError("the prompt has no tokens", param="prompt")
    for limit, what in (
        (limits.max_model_len, "the model's context length is"),
        (limits.num_kv_pages * limits.page_size, "the KV cache holds"),
    ):
        if num_prompt >= limit:
            raise RequestError(
                f"the prompt has {num_prompt} tokens and leaves no room for an answer: {what} {limit} tokens",
                param="prompt",
            )
        if max_tokens is not None and num_prompt + max_tokens > limit:
            raise RequestError(
                f"max_tokens is {max_tokens} and the prompt has {num_prompt} tokens, together more than fits: {what} "
                f"{limit} tokens",
                param="max_tokens",
            )
