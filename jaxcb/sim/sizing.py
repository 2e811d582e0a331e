"""The scheduler's limits on a card that isn't here: what the engine would choose for this model on this GPU."""

from __future__ import annotations

from jaxcb.config import EngineConfig
from jaxcb.errors import ConfigError
from jaxcb.scheduler import SchedulerLimits, knob_values
from jaxcb.sim.gpus import Gpu
from jaxcb.sim.models import Model
from jaxcb.sim.step_time import BFLOAT16_BYTES

MAX_NUM_SEQS = 256
MAX_NUM_BATCHED_TOKENS = 2048
WORKSPACE_BYTES = 2**30
"""Left for temporaries of the compiled steps."""


def limits_on(gpu: Gpu, model: Model, config: EngineConfig) -> SchedulerLimits:
    """Limits of ``config`` for ``model`` in bfloat16 on one ``gpu``.

    Raises:
        ConfigError: the model is larger than the card, or the limits don't fit what it leaves.
    """
    seqs = config.max_num_seqs or min(MAX_NUM_SEQS, config.max_num_batched_tokens or MAX_NUM_SEQS)
    wanted = config.max_model_len or model.max_position
    if wanted > model.max_position:
        raise ConfigError(
            f"max_model_len ({wanted}) is more than the model was made for ({model.max_position} tokens)",
            param="max_model_len",
        )
    pages = _num_pages(gpu, model, config, most=seqs * -(-wanted // config.page_size))
    capacity = pages * config.page_size
    if config.max_model_len is not None and capacity < wanted:
        raise ConfigError(
            f"max_model_len ({wanted}) is more than the KV cache holds: {pages} pages of {config.page_size} tokens",
            param="max_model_len",
        )
    return SchedulerLimits(
        max_num_seqs=seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or max(MAX_NUM_BATCHED_TOKENS, seqs),
        max_model_len=min(wanted, capacity),
        num_kv_pages=pages,
        page_size=config.page_size,
        num_slots=2 * seqs,
        enable_prefix_caching=config.enable_prefix_caching,
        **knob_values(config),
    )


def _num_pages(gpu: Gpu, model: Model, config: EngineConfig, most: int) -> int:
    """As many as fit, at most ``most``, unless the config says how many or how many bytes."""
    page_bytes = model.kv_bytes_per_token(BFLOAT16_BYTES) * config.page_size
    weight_bytes = model.num_params * BFLOAT16_BYTES
    free_bytes = int(gpu.memory_bytes * config.gpu_memory_utilization) - weight_bytes - WORKSPACE_BYTES
    if free_bytes < page_bytes:
        raise ConfigError(
            f"the model is larger than the card: its weights take {weight_bytes / 1e9:.1f} GB in bfloat16, and of the "
            f"{gpu.memory_bytes / 1e9:.0f} GB of one {gpu.name} {config.gpu_memory_utilization:.0%} may be used, "
            f"{WORKSPACE_BYTES / 1e9:.1f} GB of it as workspace",
            param="gpu",
        )
    fitting = free_bytes // page_bytes
    if config.num_kv_pages is not None:
        asked = config.num_kv_pages
    elif config.kv_cache_memory_bytes is not None:
        asked = config.kv_cache_memory_bytes // page_bytes
    else:
        return min(most, fitting)
    if not 0 < asked <= fitting:
        raise ConfigError(
            f"a KV cache of {asked} pages was asked for; beside the model one {gpu.name} holds 1 to {fitting} pages of "
            f"{config.page_size} tokens",
            param="num_kv_pages" if config.num_kv_pages is not None else "kv_cache_memory_bytes",
        )
    return asked
