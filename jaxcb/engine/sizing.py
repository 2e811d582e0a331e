"""Turns the Nones of an EngineConfig into numbers for this model and machine, before anything is allocated."""

from __future__ import annotations

import dataclasses
import logging
from typing import TypeVar

import jax.numpy as jnp
from jaxtyping import DTypeLike

from jaxcb import native
from jaxcb.config import Backend, EngineConfig
from jaxcb.devices import Placement
from jaxcb.engine import gpu_memory
from jaxcb.engine.gpu_memory import GPUMemory
from jaxcb.errors import ConfigError
from jaxcb.models import ModelSpec
from jaxcb.models.parallel import spec_of_part
from jaxcb.models.params import Params
from jaxcb.scheduler import Scheduler, SchedulerLimits
from jaxcb.scheduler.replay import RecordingScheduler
from jaxcb.sizing import (
    BatchLimits,
    batch_limits,
    decode_sizes,
    fills_exactly,
    mixed_sizes,
    num_host_pages,
    scheduler_limits,
    wanted_model_len,
)
from jaxcb.step.buckets import Buckets
from jaxcb.step.kv_pool import SCALE_BYTES
from jaxcb.step.orders import NOBODY, Followers
from jaxcb.step.runner import Runner
from jaxcb.step.shape import RunnerShape
from pallas_kernels import default_backend, mosaic
from pallas_kernels.platform import platform

logger = logging.getLogger(__name__)

T = TypeVar("T")
CPU_KV_BYTES = 2**30
CPU_COPY_BYTES_PER_S, GPU_LINK_BYTES_PER_S = 4e9, 2e10
"""What is taken to be achieved when pages move to host memory and back, until the engine has measured it: a copy in
memory; PCIe 4.0 x16, less than which few GPUs have."""


def resolve_config(
    config: EngineConfig, spec: ModelSpec, dtype: DTypeLike, placement: Placement | None = None
) -> EngineConfig:
    """A config without None (except ``model``, ``revision``, ``max_waiting``).

    Call it after the weights are on the device: on a GPU the KV cache takes what they leave.

    Raises:
        ConfigError: the numbers can't work together; ``.param`` names the field.
    """
    on_cpu = platform() == "cpu"
    max_model_len = wanted_model_len(config, spec.max_position)
    seqs, budget = batch_limits(config, max_model_len, on_cpu=on_cpu)
    part = spec_of_part(spec, config.tensor_parallel_size, expert_parallel=config.enable_expert_parallel)
    page_bytes = kv_bytes_per_token(config, part, jnp.dtype(dtype).itemsize) * config.page_size
    most = seqs * -(-max_model_len // config.page_size)
    memory = None
    if not on_cpu and config.num_kv_pages is None and config.kv_cache_memory_bytes is None:
        device = None if placement is None else placement.own[0][1]
        sizes = gpu_memory.Sizes(part, seqs, budget, max_model_len, config.page_size, jnp.dtype(dtype).itemsize)
        memory = gpu_memory.measure(config.gpu_memory_utilization, sizes, device)
    pages = _num_pages(config, page_bytes, most, memory)
    capacity = pages * config.page_size
    if capacity < max_model_len:
        if config.max_model_len is not None:
            raise ConfigError(
                f"max_model_len ({max_model_len}) is more than the KV cache holds: {pages} pages of {config.page_size} "
                f"tokens. Lower --max-model-len or give more memory (--kv-cache-memory-bytes, --num-kv-pages)",
                param="max_model_len",
            )
        max_model_len = capacity
    backend = _backend(config, spec, dtype)
    return dataclasses.replace(
        config,
        dtype="bfloat16" if dtype == jnp.bfloat16 else "float32",
        max_model_len=max_model_len,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        decode_buckets=decode_sizes(config, seqs, on_cpu=on_cpu),
        mixed_buckets=mixed_sizes(config, budget, on_cpu=on_cpu),
        num_kv_pages=pages,
        kv_cache_memory_bytes=pages * page_bytes,
        backend=backend,
        exact_fill=fills_exactly(config, padding_costs=backend != "native"),
    )


def limits_of(config: EngineConfig, spec: ModelSpec) -> SchedulerLimits:
    """The scheduler's limits of a resolved config."""
    on_cpu = platform() == "cpu"
    padded = config.backend != "native" or config.exact_fill
    return scheduler_limits(
        config,
        batch=BatchLimits(_set(config.max_num_seqs), _set(config.max_num_batched_tokens)),
        max_model_len=_set(config.max_model_len),
        num_kv_pages=_set(config.num_kv_pages),
        page_bytes=_page_bytes(config),
        link_bytes_per_s=CPU_COPY_BYTES_PER_S if on_cpu else GPU_LINK_BYTES_PER_S,
        step_sizes=(*_set(config.mixed_buckets), _set(config.max_num_batched_tokens)) if padded else (),
        sliding_window=_widest_window(spec),
        cache_name=f"{config.model}@{config.revision}:{config.dtype}",
    )


def scheduler_of(config: EngineConfig, spec: ModelSpec) -> Scheduler:
    """The scheduler of a resolved config."""
    limits = limits_of(config, spec)
    if config.event_log is None:
        return Scheduler(limits, spec.eos_token_ids)
    return RecordingScheduler(limits, spec.eos_token_ids, file=open(config.event_log, "w", encoding="utf-8"))


def kv_bytes_per_token(config: EngineConfig, spec: ModelSpec, itemsize: int) -> int:
    """Of all layers; ``itemsize``: of the weights."""
    if config.kv_cache_dtype == "int8":
        return spec.kv_bytes_per_token(1, SCALE_BYTES)
    return spec.kv_bytes_per_token(itemsize)


def _page_bytes(config: EngineConfig) -> int:
    return _set(config.kv_cache_memory_bytes) // _set(config.num_kv_pages)


def _widest_window(spec: ModelSpec) -> int | None:
    windows = [window for window in spec.windows if window is not None]
    return max(windows) if len(windows) == spec.num_layers else None


def shape_of(config: EngineConfig) -> RunnerShape:
    """The device arrays of a resolved config."""
    return RunnerShape(
        num_pages=_set(config.num_kv_pages),
        page_size=config.page_size,
        num_slots=2 * _set(config.max_num_seqs),
        max_model_len=_set(config.max_model_len),
        num_host_pages=num_host_pages(config, _page_bytes(config)),
        transfers=config.kv_transfer,
        int8_kv=config.kv_cache_dtype == "int8",
    )


def runner_of(
    config: EngineConfig, spec: ModelSpec, params: Params, placement: Placement, followers: Followers = NOBODY
) -> Runner:
    """The runner of a resolved config."""
    return Runner(
        spec,
        params,
        buckets_of(config),
        shape_of(config),
        backend_of(config),
        placement,
        processed_logprobs=config.logprobs_mode == "processed",
        deterministic=config.deterministic,
        fast_norm=config.fast_norm,
        processors=config.logits_processors,
        followers=followers,
    )


def buckets_of(config: EngineConfig) -> Buckets:
    """The compiled shapes of a resolved config."""
    return Buckets(
        _set(config.max_num_seqs),
        _set(config.max_num_batched_tokens),
        decode_sizes=_set(config.decode_buckets),
        mixed_sizes=_set(config.mixed_buckets),
    )


def _backend(config: EngineConfig, spec: ModelSpec, dtype: DTypeLike) -> Backend:
    backend = (
        _backend_of_part(config) if config.tensor_parallel_size > 1 else native.choose(config.backend, spec, dtype)
    )
    if config.quantization is not None and backend != "native":
        raise ConfigError(
            f"quantization {config.quantization} needs the native CPU backend, this engine has {backend} "
            "(python -m jaxcb.native says why)",
            param="quantization",
        )
    on_gpu_kernels = backend in ("triton", "mosaic")
    if config.kv_cache_dtype == "int8" and on_gpu_kernels:
        message = f"kv_cache_dtype int8 is for backends native and xla, not for {backend}"
        raise ConfigError(message, param="kv_cache_dtype")
    if config.fast_norm and (not on_gpu_kernels or config.deterministic):
        other = "deterministic" if on_gpu_kernels else f"backend {backend}"
        raise ConfigError(f"fast_norm is for the kernels of backend triton, not for {other}", param="fast_norm")
    if config.fast_norm and spec.num_experts:
        raise ConfigError("fast_norm is for models without experts, whose routers need the norm", param="fast_norm")
    if backend == "mosaic":
        _require_mosaic(config, spec, dtype)
    if backend == "triton" and platform() == "cpu" and dtype != jnp.float32:
        raise ConfigError(
            f"backend triton runs in an interpreter on a CPU, for tests, and in float32 only, got {dtype}",
            param="backend",
        )
    return backend


def _backend_of_part(config: EngineConfig) -> Backend:
    """That of a model which is cut over several devices."""
    asked = native.asked_for(config.backend)
    if asked == "native":
        raise ConfigError(
            f"backend native runs on one device, not on tensor_parallel_size {config.tensor_parallel_size}: leave it "
            "out",
            param="backend",
        )
    if asked is None and platform() == "cpu":
        logger.info("XLA runs this model: the native CPU kernels run on one device")
    return asked or default_backend()


def _require_mosaic(config: EngineConfig, spec: ModelSpec, dtype: DTypeLike) -> None:
    reason = mosaic.why_not(
        dtype=dtype,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        page_size=config.page_size,
    )
    if config.deterministic:
        reason = "deterministic attends to single tokens in the tiles of chunks, which it can't"
    if reason is not None:
        raise ConfigError(f"backend mosaic can't be used: {reason}; take triton, or leave it out", param="backend")


def backend_of(config: EngineConfig) -> Backend:
    """The attention backend of a resolved config."""
    return _set(config.backend)


_LESS = (
    "Raise --gpu-memory-utilization, lower --max-num-seqs, --max-num-batched-tokens or --max-model-len, or take a "
    "smaller model"
)
"""What to do where a GPU has no room for a page."""


def _num_pages(config: EngineConfig, page_bytes: int, most: int, memory: GPUMemory | None) -> int:
    """Pages by number, by bytes, or by what the machine has; ``most`` is what max_num_seqs full sequences need.

    ``memory``: of the GPU, if there is one and the pages are to fill it.
    """
    if config.num_kv_pages is not None:
        return config.num_kv_pages
    if config.kv_cache_memory_bytes is not None:
        pages = config.kv_cache_memory_bytes // page_bytes
    elif memory is None:
        pages = min(most, max(CPU_KV_BYTES // page_bytes, 1))
    else:
        pages = min(most, memory.for_pages // page_bytes)
    if pages < 1:
        reason = "" if memory is None else f": {memory}. {_LESS}"
        raise ConfigError(
            f"the memory for the KV cache holds no page of {config.page_size} tokens, {page_bytes:,} bytes{reason}",
            param="kv_cache_memory_bytes",
        )
    return pages


def _set(value: T | None) -> T:
    if value is None:
        raise ValueError("the config is not resolved: call resolve_config first")
    return value
