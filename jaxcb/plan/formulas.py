"""The arithmetic of serving, one formula a function. Bytes are bytes, 1 GB is 10^9 of them, times are seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxcb.errors import ConfigError


def static_utilization(lengths: Sequence[int]) -> float:
    """Part of the slots' steps that generate something when a static batch runs until its longest answer has ended:
    sum(lengths) / (n * max(lengths)). With continuous batching and a queue that is never empty it is 1."""
    if not lengths or min(lengths) < 1:
        raise ConfigError(f"lengths must be positive, and at least one, got {list(lengths)}", param="lengths")
    return sum(lengths) / (len(lengths) * max(lengths))


def max_concurrent(*, memory_bytes: float, weight_bytes: float, kv_bytes_per_token: float, context: float) -> int:
    """Requests of ``context`` tokens whose KV fits beside the weights."""
    free_bytes = memory_bytes - weight_bytes
    if free_bytes <= 0:
        raise ConfigError(
            f"the model is larger than the card: its weights take {weight_bytes / 1e9:.1f} of {memory_bytes / 1e9:.1f} "
            "GB",
            param="memory",
        )
    return int(free_bytes // (kv_bytes_per_token * context))


def largest_chunk(*, itl_s: float, decode_s: float, prefill_tokens_per_s: float) -> int:
    """Prompt tokens that may share a step with decodes: what is left of the gap between two tokens after the decodes'
    own step, at the speed of prefill."""
    if itl_s <= decode_s:
        raise ConfigError(
            f"the gap between tokens can't be held: a step of decodes alone takes {decode_s * 1e3:g} ms, the limit is "
            f"{itl_s * 1e3:g} ms",
            param="itl",
        )
    return math.floor((itl_s - decode_s) * prefill_tokens_per_s + 1e-6)


def longest_prompt(*, ttft_s: float, itl_s: float, chunk: int, waits: bool) -> int:
    """Tokens of the longest prompt whose first token can be promised within ``ttft_s``, if a chunk of it shares each
    step of ``itl_s`` with the decodes. It ``waits`` for the step that runs when it comes, or comes between two."""
    num_steps = math.floor(ttft_s / itl_s + 1e-9) - waits
    return max(num_steps, 0) * chunk


def swap_s(*, num_tokens: int, kv_bytes_per_token: float, link_bandwidth: float) -> float:
    """Time to move the KV of a sequence over the host link, one way."""
    return num_tokens * kv_bytes_per_token / link_bandwidth


def prefix_speedup(
    num_sharing: int, *, prefix: int, suffix: int, output: int, token_s: float, decode_s: Sequence[float]
) -> float:
    """Throughput of ``num_sharing`` requests at a time that find their prefix cached, over that of one at a time
    without a cache.

    One alone computes prefix and suffix and decodes: (P + U) c + O d(1). A batch of k computes only the suffixes and
    decodes together: k U c + O d(k). So the speedup is

        k * ((P + U) c + O d(1)) / (k U c + O d(k))

    and while reading the weights bounds the decode step, d(k) = d(1), it is more than k for every k < 1 + P / U:
    batching divides the cost of a decode step, and caching takes away prefill that batching could not divide.

    Arguments:
        token_s: c, time of prefill for one token.
        decode_s: (d(1), d(k)), times of a decode step alone and in the batch.
    """
    alone_s = (prefix + suffix) * token_s + output * decode_s[0]
    together_s = num_sharing * suffix * token_s + output * decode_s[1]
    return num_sharing * alone_s / together_s


def superlinear_until(*, prefix: int, suffix: int) -> float:
    """Requests that share a prefix, below which :func:`prefix_speedup` is more than their number."""
    return 1 + prefix / suffix
