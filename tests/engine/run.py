"""Submit a batch of prompts to an engine and wait for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

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


def prompts_that_share_beginnings(
    lengths: Sequence[int],
    count: int,
    vocab_size: int,
    *,
    log_mean: float,
    log_sigma: float,
    longest: int,
    seed: int,
) -> list[list[int]]:
    """``count`` prompts: of the given lengths, then of lognormal ones; every third begins like the one before it."""
    rng = np.random.default_rng(seed)
    drawn = np.clip(np.exp(rng.normal(log_mean, log_sigma, count - len(lengths))), 1, longest).astype(int)
    prompts: list[list[int]] = []
    for i, length in enumerate([*lengths, *drawn]):
        ids = rng.integers(0, vocab_size, length).tolist()
        if i % 3 == 2:
            shared = prompts[-1][: length - 1]
            ids[: len(shared)] = shared
        prompts.append(ids)
    return prompts
