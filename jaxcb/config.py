"""The one frozen configuration of an engine. Every limit that the engine has is a field here, validated once."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, Literal, get_args

from jaxcb import validation
from jaxcb.errors import ConfigError
from jaxcb.held_model import HeldModel
from jaxcb.logits_processor import LogitsProcessor
from jaxcb.scheduler.knobs import SchedulingKnobs

DType = Literal["auto", "float32", "bfloat16"]
Backend = Literal["xla", "triton", "mosaic", "native"]
LogprobsMode = Literal["raw", "processed"]
Quantization = Literal["int8"]
KVCacheDType = Literal["auto", "int8", "float32", "bfloat16"]
PAGE_SIZES = (8, 16, 32, 64, 128)
_POSITIVE = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_kv_pages",
    "kv_cache_memory_bytes",
    "max_waiting",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig(SchedulingKnobs):
    """Settings of one engine. ``None`` means "choose for this machine and model when the engine starts".

    Beside these it has the fields of :class:`jaxcb.scheduler.SchedulingKnobs`, which say how requests share the engine.

    Arguments:
        model: a Hugging Face directory, a hub id, a ``.gguf`` file, an Orbax checkpoint directory written by
            ``python -m jaxcb.weights convert``, or None for the built-in SmolLM2-135M-Instruct. Or parameters that you
            hold, (spec, params) or a :class:`jaxcb.held_model.HeldModel`; the engine then uses these arrays
            (the native CPU kernels: a copy in a layout of their own, beside yours).
        revision: branch, tag or commit of a hub id.
        dtype: weights, activations and, with ``kv_cache_dtype`` "auto", KV cache. "auto" is bfloat16 on GPUs, under the
            native CPU kernels and on CPUs with AVX512-BF16, float32 elsewhere. Products accumulate in float32 in every
            case.
        quantization: "int8" makes the weights int8 with a scale an output channel when they are loaded; dtype is then
            that of the embedding and the KV cache. Needs the native backend.
        kv_cache_dtype: "auto": that of the weights; "int8": keys and values are rounded to int8 as they are written,
            with a float32 scale for each head of each token, so that a page takes about half of bfloat16's bytes. For
            backends native and xla; on xla it's ``deterministic`` that makes answers independent of their company. The
            names of the other two dtypes may stand beside an equal ``dtype``.
        max_model_len: most tokens (prompt and answer) of a sequence. Default: the model's own limit, or what the KV
            cache holds if that is less.
        max_num_seqs: sequences in one step. Default 32 on a CPU, 256 on a GPU.
        max_num_batched_tokens: the token budget of one step. Default 512 on a CPU, 2048 on a GPU.
        decode_buckets: row counts below ``max_num_seqs`` for which a decode step is compiled. Default: by platform.
        mixed_buckets: token counts below ``max_num_batched_tokens`` for which a step with prompt chunks is compiled.
        tensor_parallel_size: devices that the model is cut over: each has some heads, some features of the MLP and a
            part of the vocabulary. What is said of memory below is of each. Not for the native CPU kernels: a CPU that
            counts as several devices runs XLA's.
        enable_expert_parallel: of a model with experts that is cut over several devices, each has some of the experts,
            whole, instead of some features of every expert.
        data_parallel_size: engines behind one queue, each with the whole model on ``tensor_parallel_size`` devices of
            its own; every limit and every amount of memory here is of each, but ``max_waiting``, which is of all.
            (:func:`jaxcb.cluster.start` starts them.)
        nnodes: hosts that the model is cut over, each with as many of the ``tensor_parallel_size`` devices. Every host
            starts with the same settings and a rank of its own; the first answers. (:func:`jaxcb.hosts.start` starts
            that one, :func:`jaxcb.hosts.follow` the others; the server does either by its rank.)
        node_rank: which of the hosts this is, from 0.
        dist_init_addr: HOST:PORT where host 0 listens for the others.
        dist_timeout_s: how long hosts wait for each other at the start.
        page_size: tokens in a KV page; a power of two from 8 to 128.
        num_kv_pages: usable pages of the KV cache. Default: as many as ``kv_cache_memory_bytes`` holds.
        kv_cache_memory_bytes: memory for the KV cache. Default: on a GPU what ``gpu_memory_utilization`` leaves after
            the weights, on a CPU 1 GiB or what ``max_num_seqs`` full sequences need, whichever is less.
        gpu_memory_utilization: part of the GPU's memory that the engine may take.
        enable_prefix_caching: reuse the KV pages of equal prompt beginnings.
        run_ahead: plan and launch step k+1 while step k runs. Off, every step waits for the one before.
        host_kv_gib: host memory in GiB for KV pages: of sequences that are swapped out, and of prefixes that the device
            had no room for. 0: none.
        kv_transfer: the KV of beginnings can be handed to other engines and taken from them (:mod:`jaxcb.disagg`).
        max_waiting: most requests in the waiting queue; None is unbounded. One more raises QueueFullError.
        logprobs_mode: "raw": log-probabilities are those of the model's own logits; "processed": of what is drawn from,
            after the penalties, the temperature and the filters.
        generation_config: "auto": what a request leaves out (temperature, top_k, top_p, min_p, repetition_penalty,
            max_tokens) is what the model's ``generation_config.json`` says, if it says it; "none": the engine's own
            defaults; else a directory to take that file from. The model's end tokens hold in every case.
        deterministic: tokens and log-probabilities of a request have the same bits in batches of any size and order of
            arrival, for every token budget and chunk, with prefix caching or without, after every preemption. Costs
            speed (README). Off, tokens are the same in float32 on a CPU, and the last bits may differ.
        fast_norm: on GPUs, two kernels less a layer: the scales of the norms go into the weights after them, and the
            root mean square is divided by after the product. Rounds otherwise, no worse (bench/README.md).
        event_log: a file to write every call of the scheduler to, from which ``python -m jaxcb.scheduler.replay`` makes
            the same plans again: for bug reports. It holds the prompts as token ids.
        logits_processors: functions of your own over a step's logits, compiled into the sampler.
        seed: folded into the seeds of requests that bring none.
        backend: who computes attention ("native": products too). None takes ``$JAXCB_BACKEND``, else triton on GPUs,
            and on CPUs native where its kernels can be built and run, else xla. "mosaic" is triton but for the chunks
            of prompts, on Hopper with jax 0.11 (not yet timed on a device).
        step_log: a file that gets a line of JSON a step (what it computed, how long it took), from which the simulator
            calibrates itself: ``jaxcb.sim.StepTimeModel.fit(file)``.
        trace: a file that gets a Chrome trace of the engine: planning, launching, the device, committing and text, a
            lane each; ui.perfetto.dev opens it. (With ``data_parallel_size`` each engine writes its own event_log,
            step_log and trace: ``trace-0.json``, ``trace-1.json``.)

    Raises:
        ConfigError: a value can't work; ``.param`` names the field.
    """

    model: str | os.PathLike[str] | HeldModel | tuple[Any, Any] | None = None
    revision: str | None = None
    dtype: DType = "auto"
    quantization: Quantization | None = None
    kv_cache_dtype: KVCacheDType = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    decode_buckets: tuple[int, ...] | None = None
    mixed_buckets: tuple[int, ...] | None = None
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    data_parallel_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None
    dist_timeout_s: float = 300.0
    page_size: int = 16
    num_kv_pages: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.92
    enable_prefix_caching: bool = True
    run_ahead: bool = True
    host_kv_gib: float = 0.0
    kv_transfer: bool = False
    max_waiting: int | None = None
    logprobs_mode: LogprobsMode = "raw"
    generation_config: str = "auto"
    deterministic: bool = False
    fast_norm: bool = False
    event_log: str | os.PathLike[str] | None = None
    logits_processors: tuple[LogitsProcessor, ...] = ()
    seed: int = 0
    backend: Backend | None = None
    step_log: str | os.PathLike[str] | None = None
    trace: str | os.PathLike[str] | None = None

    @classmethod
    def preset(cls, name: str, **changes: Any) -> EngineConfig:
        """The settings of a published system ("vllm-v1", "sarathi", ...; see :mod:`jaxcb.presets`), with changes.

        Raises:
            ConfigError: there is no such system, or it needs several engines.
        """
        from jaxcb.presets import engine_settings

        return cls(**(engine_settings(name) | changes))

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("model", "event_log", "step_log", "trace", "generation_config"):
            if isinstance(getattr(self, name), os.PathLike):
                self._set(name, os.fspath(getattr(self, name)))
        if isinstance(self.model, tuple) and len(self.model) == 2:
            self._set("model", HeldModel(*self.model))
        names = ("revision", "dist_init_addr", "event_log", "step_log", "trace")
        for name in names if isinstance(self.model, HeldModel) else ("model", *names):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"{name} must be a string, got {validation.shown(value)}", param=name)
        if not isinstance(self.generation_config, str) or not self.generation_config:
            raise ConfigError(
                f"generation_config must be auto, none or a directory, got {validation.shown(self.generation_config)}",
                param="generation_config",
            )
        _choice("dtype", self.dtype, get_args(DType))
        _choice("logprobs_mode", self.logprobs_mode, get_args(LogprobsMode))
        _choice("quantization", self.quantization, (None, *get_args(Quantization)))
        _choice("kv_cache_dtype", self.kv_cache_dtype, get_args(KVCacheDType))
        _choice("backend", self.backend, (None, *get_args(Backend)))
        for name in _POSITIVE:
            if getattr(self, name) is not None:
                self._set(name, validation.integer(name, getattr(self, name), low=1, error=ConfigError))
        for name in ("decode_buckets", "mixed_buckets"):
            sizes = getattr(self, name)
            if sizes is None:
                continue
            if not isinstance(sizes, tuple | list):
                raise ConfigError(f"{name} must be a tuple of positive integers, got {sizes!r}", param=name)
            self._set(name, tuple(validation.integer(name, size, low=1, error=ConfigError) for size in sizes))
        if not isinstance(self.logits_processors, tuple | list) or not all(
            isinstance(processor, LogitsProcessor) for processor in self.logits_processors
        ):
            given = validation.shown(self.logits_processors)
            raise ConfigError(f"logits_processors must hold LogitsProcessors, got {given}", param="logits_processors")
        self._set("logits_processors", tuple(self.logits_processors))
        size = validation.integer("tensor_parallel_size", self.tensor_parallel_size, low=1, error=ConfigError)
        self._set("tensor_parallel_size", size)
        count = validation.integer("data_parallel_size", self.data_parallel_size, low=1, error=ConfigError)
        self._set("data_parallel_size", count)
        for name in ("quantization", "fast_norm") if size > 1 else ():
            if getattr(self, name):
                raise ConfigError(f"{name} is for one device, not for tensor_parallel_size {size}", param=name)
        if size > 1 and self.kv_cache_dtype == "int8":
            raise ConfigError(
                f"kv_cache_dtype int8 is for one device, not for tensor_parallel_size {size}", param="kv_cache_dtype"
            )
        self._check_hosts()
        if self.enable_expert_parallel and size == 1:
            raise ConfigError(
                "enable_expert_parallel puts experts on several devices: set tensor_parallel_size to their number",
                param="enable_expert_parallel",
            )
        _choice("page_size", self.page_size, PAGE_SIZES)
        for name, low, high in (("gpu_memory_utilization", 0.01, 1.0), ("host_kv_gib", 0.0, 2.0**20)):
            self._set(name, validation.number(name, getattr(self, name), low=low, high=high, error=ConfigError))
        for name in (
            "enable_expert_parallel",
            "enable_prefix_caching",
            "run_ahead",
            "kv_transfer",
            "deterministic",
            "fast_norm",
        ):
            validation.boolean(name, getattr(self, name), error=ConfigError)
        self._set("seed", validation.integer("seed", self.seed, low=-(2**63), high=2**63 - 1, error=ConfigError))
        if self.kv_cache_dtype not in ("auto", "int8", self.dtype):
            raise ConfigError(
                f"kv_cache_dtype must be auto, int8 or the model's own: kv_cache_dtype {self.kv_cache_dtype} needs "
                f"dtype {self.kv_cache_dtype}, got dtype {self.dtype}",
                param="kv_cache_dtype",
            )
        if self.preemption == "swap" and not self.host_kv_gib:
            raise ConfigError("preemption 'swap' needs host memory: set host_kv_gib", param="host_kv_gib")
        budget, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if budget is not None and seqs is not None and budget < seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({budget}) must be at least max_num_seqs ({seqs}): every running sequence "
                "needs one token a step",
                param="max_num_batched_tokens",
            )

    def _check_hosts(self) -> None:
        for name, low in (("nnodes", 1), ("node_rank", 0)):
            self._set(name, validation.integer(name, getattr(self, name), low=low, error=ConfigError))
        timeout_s = validation.number("dist_timeout_s", self.dist_timeout_s, low=0.1, high=1e6, error=ConfigError)
        self._set("dist_timeout_s", timeout_s)
        count, size = self.nnodes, self.tensor_parallel_size
        if self.node_rank >= count:
            raise ConfigError(f"node_rank must be less than nnodes {count}, got {self.node_rank}", param="node_rank")
        if count == 1:
            if self.dist_init_addr is not None:
                raise ConfigError("dist_init_addr is for several hosts: set nnodes", param="dist_init_addr")
            return
        if self.dist_init_addr is None:
            raise ConfigError(f"nnodes {count} needs dist_init_addr, HOST:PORT of host 0", param="dist_init_addr")
        if size % count:
            raise ConfigError(
                f"tensor_parallel_size counts the devices of all hosts, and must be a multiple of nnodes {count}, got "
                f"{size}",
                param="tensor_parallel_size",
            )
        if self.data_parallel_size > 1:
            raise ConfigError(f"data_parallel_size is for one host, not for nnodes {count}", param="data_parallel_size")
        if self.kv_transfer:
            raise ConfigError(f"kv_transfer is for one host, not for nnodes {count}", param="kv_transfer")

    def _set(self, name: str, value: object) -> None:
        """For __post_init__ alone: the checked value takes the place of the given one."""
        object.__setattr__(self, name, value)


def _choice(name: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        *others, last = (str(choice) for choice in allowed if choice is not None)
        raise ConfigError(f"{name} must be {', '.join(others)} or {last}, got {validation.shown(value)}", param=name)
