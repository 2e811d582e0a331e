"""The scheduler's limits on a card that isn't here: what the engine would choose for this model on this GPU."""

from __future__ import annotations

from jaxcb.config import EngineConfig
from jaxcb.errors import ConfigError
from jaxcb.scheduler import SchedulerLimits, StepPlan
from jaxcb.sim.calibrate import padded_tokens
from jaxcb.sim.gpus import Gpu
from jaxcb.sim.models import Model
from jaxcb.sim.replica import Padding
from jaxcb.sim.step_time import BFLOAT16_BYTES
from jaxcb.sizing import (
    GPU_WORKSPACE_BYTES,
    batch_limits,
    decode_sizes,
    mixed_sizes,
    scheduler_limits,
    wanted_model_len,
)


def limits_on(gpu: Gpu, model: Model, config: EngineConfig) -> SchedulerLimits:
    """Limits of ``config`` for ``model`` in bfloat16 on one ``gpu``.

    Raises:
        ConfigError: the model is larger than the card, or the limits don't fit what it leaves.
    """
    wanted = wanted_model_len(config, model.max_position)
    batch = batch_limits(config, wanted, on_cpu=False)
    page_bytes = model.kv_bytes_per_token(BFLOAT16_BYTES) * config.page_size
    pages = _num_pages(gpu, model, config, page_bytes, most=batch.num_seqs * -(-wanted // config.page_size))
    capacity = pages * config.page_size
    if config.max_model_len is not None and capacity < wanted:
        raise ConfigError(
            f"max_model_len ({wanted}) is more than the KV cache holds: {pages} pages of {config.page_size} tokens",
            param="max_model_len",
        )
    return scheduler_limits(
        config,
        batch=batch,
        max_model_len=min(wanted, capacity),
        num_kv_pages=pages,
        page_bytes=page_bytes,
        link_bytes_per_s=gpu.host_bandwidth,
        step_sizes=(*mixed_sizes(config, batch.num_tokens, on_cpu=False), batch.num_tokens),
    )


def bucket_padding(config: EngineConfig, limits: SchedulerLimits) -> Padding:
    """Tokens that this engine computes for a plan on a GPU: those of the compiled size that it runs in."""
    mixed = limits.step_sizes
    decode = (*decode_sizes(config, limits.max_num_seqs, on_cpu=False), limits.max_num_seqs)

    def padding(plan: StepPlan) -> int:
        return padded_tokens(plan.num_tokens, decode if plan.decode_only else mixed)

    return padding


def _num_pages(gpu: Gpu, model: Model, config: EngineConfig, page_bytes: int, most: int) -> int:
    """As many as fit, at most ``most``, unless the config says how many or how many bytes."""
    weight_bytes = model.num_params * BFLOAT16_BYTES
    free_bytes = int(gpu.memory_bytes * config.gpu_memory_utilization) - weight_bytes - GPU_WORKSPACE_BYTES
    if free_bytes < page_bytes:
        raise ConfigError(
            f"the model is larger than the card: its weights take {weight_bytes / 1e9:.1f} GB in bfloat16, and of the "
            f"{gpu.memory_bytes / 1e9:.0f} GB of one {gpu.name} {config.gpu_memory_utilization:.0%} may be used, "
            f"{GPU_WORKSPACE_BYTES / 1e9:.1f} GB of it as workspace",
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
