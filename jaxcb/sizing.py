"""Sizes that depend on a model and a machine, for the engine and for a simulation of it: one rule, and no jax."""

from __future__ import annotations

from typing import NamedTuple

from jaxcb.config import EngineConfig
from jaxcb.errors import ConfigError
from jaxcb.scheduler import SchedulerLimits, knob_values

# Chosen by python -m bench.padding: at most 16 programs, little padding. GPUs pad two and four rows to eight anyway.
CPU_DECODE_BUCKETS, GPU_DECODE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128), (1, 8, 16, 32, 64, 128, 256)
CPU_MIXED_BUCKETS = (64, 128, 256, 384, 512, 1024, 2048)
GPU_MIXED_BUCKETS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 4096)
GPU_WORKSPACE_BYTES = 2**30
"""Left for temporaries of the compiled steps where a simulation knows a model's size alone; the engine counts them
(:mod:`jaxcb.engine.gpu_memory`)."""

PROMPT_ROWS = 64
"""Prompt positions whose log-probabilities one call computes."""


class BatchLimits(NamedTuple):
    """Sizes of the largest step."""

    num_seqs: int
    num_tokens: int


def batch_limits(config: EngineConfig, max_model_len: int, *, on_cpu: bool) -> BatchLimits:
    """What the config says, or what suits the platform."""
    seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
    if seqs is None:
        seqs = min(32 if on_cpu else 256, tokens or 256)
    if tokens is None:
        tokens = max(512 if on_cpu else 2048, seqs)
        if not config.enable_chunked_prefill:
            tokens = max(tokens, max_model_len)
    return BatchLimits(seqs, tokens)


def wanted_model_len(config: EngineConfig, max_position: int) -> int:
    """The context that was asked for, or the model's own.

    Raises:
        ConfigError: it is more than the model was made for.
    """
    if config.max_model_len is not None and config.max_model_len > max_position:
        raise ConfigError(
            f"max_model_len ({config.max_model_len}) is more than the model was made for ({max_position} tokens)",
            param="max_model_len",
        )
    return config.max_model_len or max_position


def mixed_sizes(config: EngineConfig, num_tokens: int, *, on_cpu: bool) -> tuple[int, ...]:
    """Compiled token counts below the largest, ``num_tokens``, of steps with prompt chunks."""
    return _below(config.mixed_buckets, CPU_MIXED_BUCKETS if on_cpu else GPU_MIXED_BUCKETS, num_tokens)


def decode_sizes(config: EngineConfig, num_seqs: int, *, on_cpu: bool) -> tuple[int, ...]:
    """Compiled row counts below the largest, ``num_seqs``, of steps that only decode."""
    return _below(config.decode_buckets, CPU_DECODE_BUCKETS if on_cpu else GPU_DECODE_BUCKETS, num_seqs)


def fills_exactly(config: EngineConfig, *, padding_costs: bool) -> bool:
    """Whether chunks are trimmed to compiled sizes: as the config says, or where it saves something."""
    if config.exact_fill is None:
        return padding_costs and config.enable_chunked_prefill
    return config.exact_fill


def logprobs_bytes(vocab_size: int, num_seqs: int) -> int:
    """Most memory of a device that log-probabilities take at once, whatever is asked for.

    Those of every id of every row, float32, of the two steps that run-ahead has in flight, and twice that while the
    second is computed; and of ``PROMPT_ROWS`` positions of prompts, their logits and what is in between. Calls for more
    positions wait for each other where every id is asked for; of the likeliest ids there are few.
    """
    row_bytes = 4 * vocab_size
    return 4 * num_seqs * row_bytes + 4 * PROMPT_ROWS * row_bytes


def num_host_pages(config: EngineConfig, page_bytes: int) -> int:
    """Pages that the host memory of the config holds."""
    return int(config.host_kv_gib * 2**30) // page_bytes


def scheduler_limits(
    config: EngineConfig,
    *,
    batch: BatchLimits,
    max_model_len: int,
    num_kv_pages: int,
    page_bytes: int,
    link_bytes_per_s: float,
    step_sizes: tuple[int, ...] = (),
    sliding_window: int | None = None,
    cache_name: str = "",
) -> SchedulerLimits:
    """The scheduler's limits: the knobs of the config, and the sizes that were chosen."""
    return SchedulerLimits(
        max_num_seqs=batch.num_seqs,
        max_num_batched_tokens=batch.num_tokens,
        max_model_len=max_model_len,
        num_kv_pages=num_kv_pages,
        page_size=config.page_size,
        num_slots=2 * batch.num_seqs,
        enable_prefix_caching=config.enable_prefix_caching,
        num_host_pages=num_host_pages(config, page_bytes),
        host_page_s=page_bytes / link_bytes_per_s,
        step_sizes=step_sizes,
        sliding_window=sliding_window,
        cache_name=cache_name,
        **knob_values(config),
    )


def _below(asked: tuple[int, ...] | None, default: tuple[int, ...], limit: int) -> tuple[int, ...]:
    return tuple(sorted(size for size in (default if asked is None else asked) if size < limit))
