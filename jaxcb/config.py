"""The one frozen configuration of an engine. Every limit that the engine has is a field here, validated once."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxcb.errors import ConfigError

DType = Literal["auto", "float32", "bfloat16"]
Backend = Literal["xla", "triton"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. ``None`` means "choose for this machine and model when the engine starts".

    Arguments:
        model: a Hugging Face directory, a hub id, a ``.gguf`` file, an Orbax checkpoint directory written by
            ``python -m jaxcb.weights convert``, or None for the built-in SmolLM2-135M-Instruct.
        revision: branch, tag or commit of a hub id.
        dtype: weights, activations and KV cache. "auto" is bfloat16 on GPUs and on CPUs with AVX512-BF16, float32
            elsewhere. Products accumulate in float32 in every case.
        max_model_len: most tokens (prompt and answer) of a sequence. Default: the model's own limit, or what the KV
            cache holds if that is less.
        max_num_seqs: sequences in one step. Default 32 on a CPU, 256 on a GPU.
        max_num_batched_tokens: the token budget of one step. Default 512 on a CPU, 2048 on a GPU.
        decode_buckets: row counts below ``max_num_seqs`` for which a decode step is compiled. Default: by platform.
        mixed_buckets: token counts below ``max_num_batched_tokens`` for which a step with prompt chunks is compiled.
        page_size: tokens in a KV page; a power of two from 8 to 128.
        num_kv_pages: usable pages of the KV cache. Default: as many as ``kv_cache_memory_bytes`` holds.
        kv_cache_memory_bytes: memory for the KV cache. Default: on a GPU what ``gpu_memory_utilization`` leaves after
            the weights, on a CPU 1 GiB or what ``max_num_seqs`` full sequences need, whichever is less.
        gpu_memory_utilization: part of the GPU's memory that the engine may take.
        enable_prefix_caching: reuse the KV pages of equal prompt beginnings.
        run_ahead: plan and launch step k+1 while step k runs. Off, every step waits for the one before.
        admission_watermark: part of the KV pages that new requests leave free while others run, so that these can grow
            without being preempted.
        max_waiting: most requests in the waiting queue; None is unbounded. One more raises QueueFullError.
        seed: folded into the seeds of requests that bring none.
        backend: attention backend; None chooses by platform ("xla" on CPUs, "triton" on GPUs).
        step_log: a file that gets a line of JSON a step (what it computed, how long it took), from which the simulator
            calibrates itself: ``jaxcb.sim.StepTimeModel.fit(file)``.

    Raises:
        ConfigError: a value can't work; ``.param`` names the field.
    """

    model: str | None = None
    revision: str | None = None
    dtype: DType = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    decode_buckets: tuple[int, ...] | None = None
    mixed_buckets: tuple[int, ...] | None = None
    page_size: int = 16
    num_kv_pages: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.92
    enable_prefix_caching: bool = True
    run_ahead: bool = True
    admission_watermark: float = 0.01
    max_waiting: int | None = None
    seed: int = 0
    backend: Backend | None = None
    step_log: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ConfigError(f"dtype must be auto, float32 or bfloat16, got {self.dtype!r}", param="dtype")
        if self.backend not in (None, "xla", "triton"):
            raise ConfigError(f"backend must be xla or triton, got {self.backend!r}", param="backend")
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "num_kv_pages",
            "kv_cache_memory_bytes",
            "max_waiting",
        ):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} must be a positive integer, got {value!r}", param=name)
        for name in ("decode_buckets", "mixed_buckets"):
            sizes = getattr(self, name)
            if sizes is not None and not (
                isinstance(sizes, tuple) and all(isinstance(x, int) and x > 0 for x in sizes)
            ):
                raise ConfigError(f"{name} must be a tuple of positive integers, got {sizes!r}", param=name)
        if self.page_size not in (8, 16, 32, 64, 128):
            raise ConfigError(f"page_size must be 8, 16, 32, 64 or 128, got {self.page_size!r}", param="page_size")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization!r}",
                param="gpu_memory_utilization",
            )
        if not 0.0 <= self.admission_watermark < 1.0:
            raise ConfigError(
                f"admission_watermark must be in [0, 1), got {self.admission_watermark!r}", param="admission_watermark"
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed must be an integer, got {self.seed!r}", param="seed")
        budget, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if budget is not None and seqs is not None and budget < seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({budget}) must be at least max_num_seqs ({seqs}): every running sequence "
                "needs one token a step",
                param="max_num_batched_tokens",
            )
