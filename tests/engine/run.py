"""Submit a batch of prompts to an engine and wait for all of them."""

from __future__ import annotations

from collections.abc import Sequence

from jaxcb.engine import Engine
from jaxcb.request import Request, RequestOutput, SamplingParams


def complete(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams]
) -> list[RequestOutput]:
    """Final outputs, in the order of the prompts, all submitted at once."""
    each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    streams = [
        engine.submit(Request(request_id=f"{i}", prompt_token_ids=prompt, sampling=params))
        for i, (prompt, params) in enumerate(zip(prompts, each, strict=True))
    ]
    return [list(stream)[-1] for stream in streams]
