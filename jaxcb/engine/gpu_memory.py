"""What of a GPU's memory is left for KV pages: all that jax may take, less weights, state and what the programs need.

Programs run one after the other, so the largest one's temporary memory counts once. A forward's is bounded by two
layers' activations, which ``python -m bench.audit`` holds against compiled programs; the samplers', of which the
fullest takes the most, by a number of arrays [S, V].
"""

from __future__ import annotations

import math
import os
from typing import NamedTuple

import jax
from jax._src.xla_bridge import backends_are_initialized  # jax has no public name for it

from jaxcb.errors import ConfigError
from jaxcb.models import ModelSpec
from jaxcb.sizing import logprobs_bytes
from jaxcb.step.controls import ControlLayout
from pallas_kernels.triton.work import decode_entries

VARIABLES = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
"""Environment variables, an older and a newer name: the part of a GPU's memory that jax takes when it starts."""
DEFAULT_FRACTION = 0.75
"""Without it."""
LIBRARY_BYTES = 40 * 2**20
"""Workspace of the library's products on a Hopper GPU (32 MiB; 4 MiB on others), and small things."""
SAMPLER_ARRAYS = 14
"""float32 arrays [S, V] that the fullest sampler holds at once: 12.7 on an H200 at S 256, V 128,256, compiled."""
STEPS_IN_FLIGHT = 2
FRAGMENTS_BYTES = 2**28
"""Left over, since memory is given and taken in pieces."""


class Sizes(NamedTuple):
    """What the programs are made for. ``num_tokens``: of the largest step; ``itemsize``: of weights and pages."""

    spec: ModelSpec
    num_seqs: int
    num_tokens: int
    max_model_len: int
    page_size: int
    itemsize: int


class GPUMemory(NamedTuple):
    """Bytes of a GPU, by use."""

    allowed: int
    """What the engine may take: of all, ``gpu_memory_utilization``, or what jax holds if that is less."""
    in_use: int
    """Weights, above all."""
    state: int
    programs: int
    """Temporary memory of the largest, and what is in flight between them: logits, hidden states, log-probabilities."""

    @property
    def for_pages(self) -> int:
        return self.allowed - self.in_use - self.state - self.programs - FRAGMENTS_BYTES

    def __str__(self) -> str:
        parts = (("weights", self.in_use), ("state of the slots", self.state), ("programs", self.programs))
        taken = ", ".join(f"{value / 1e9:.2f} GB for {name}" for name, value in parts)
        return f"of {self.allowed / 1e9:.2f} GB of GPU memory that the engine may take, {taken}"


HOST_VARIABLE, HOST_GIB = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", 64
"""How much host memory jax may pin on machines with GPUs, and how much that is by itself."""

_started = DEFAULT_FRACTION
"""The part of a GPU's memory that jax was started with, unless the variable says so."""


def start_jax(utilization: float, host_gib: float = 0.0) -> None:
    """Start jax so that it takes that part of a GPU's memory at once, and may pin ``host_gib`` GiB of the host's beside
    what it needs itself. Where it runs already, nothing changes, nor what the user has set a variable for."""
    global _started
    if backends_are_initialized():
        return
    wanted = {}
    if not any(variable in os.environ for variable in VARIABLES):
        wanted[VARIABLES[0]] = f"{utilization:.4f}"
    if host_gib and HOST_VARIABLE not in os.environ:
        wanted[HOST_VARIABLE] = str(HOST_GIB + math.ceil(host_gib))
    if not wanted:
        return
    os.environ.update(wanted)
    try:
        jax.devices()
    finally:
        for variable in wanted:  # they are for this process's jax alone, not for those that it starts
            del os.environ[variable]
    if VARIABLES[0] in wanted:
        _started = utilization


def measure(utilization: float, sizes: Sizes, device: jax.Device | None = None) -> GPUMemory:
    """The account of a GPU, or of the first. Call it when the weights are there and nothing else is.

    Raises:
        ConfigError: jax keeps no account of the GPU's memory.
    """
    stats = (device or jax.local_devices()[0]).memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ConfigError(
            "jax doesn't say how much of the GPU's memory is free (another allocator, XLA_PYTHON_CLIENT_ALLOCATOR?): "
            "give --kv-cache-memory-bytes or --num-kv-pages",
            param="kv_cache_memory_bytes",
        )
    return account(allowed_bytes(stats["bytes_limit"], utilization), stats["bytes_in_use"], sizes)


def account(allowed: int, in_use: int, sizes: Sizes) -> GPUMemory:
    """With what is known of an engine of those sizes before it has compiled anything."""
    return GPUMemory(allowed, in_use, state_bytes(sizes), programs_bytes(sizes))


def allowed_bytes(limit: int, utilization: float) -> int:
    """Of the ``limit`` of bytes that jax may take: all, if that is no more than the engine's part of the GPU."""
    given = next((os.environ[variable] for variable in VARIABLES if variable in os.environ), None)
    fraction = _started if given is None else float(given)
    return int(limit * min(1.0, utilization / fraction))


def state_bytes(sizes: Sizes) -> int:
    """Bytes of the slots' state: two slots a sequence, and the trash slot."""
    controls = ControlLayout(sizes.spec.vocab_size, sizes.max_model_len)
    row = 4 * (controls.size + -(-sizes.max_model_len // sizes.page_size) + 1)
    return (2 * sizes.num_seqs + 1) * row


def programs_bytes(sizes: Sizes) -> int:
    """Most bytes that programs take while they run, beside their arguments, and that lie between two of them."""
    spec, num_seqs, num_tokens = sizes.spec, sizes.num_seqs, sizes.num_tokens
    temporary = max(
        forward_bytes(spec, num_tokens, num_seqs, sizes.itemsize),
        sampler_bytes(spec.vocab_size, num_seqs, sizes.max_model_len),
    )
    a_step = (num_seqs * spec.vocab_size + num_tokens * spec.hidden_size) * sizes.itemsize
    return temporary + STEPS_IN_FLIGHT * a_step + logprobs_bytes(spec.vocab_size, num_seqs)


def forward_bytes(spec: ModelSpec, num_tokens: int, num_seqs: int, itemsize: int) -> int:
    """Most temporary bytes of a forward: all that the kernels of two layers write, the library's workspace, and partial
    results of attention."""
    E, F, H = spec.hidden_size, spec.intermediate_size, spec.q_size
    mlp = 3 * F  # gate, up, product
    if k := spec.num_experts_per_token:
        mlp = k * (3 * F + 2 * E) + 4 * spec.num_experts  # the same and down of each, also as they are mixed; scores
    activations = 4 * E + (H + 2 * spec.kv_size) + 2 * H + mlp  # norms, streams; qkv; q, attention
    partials = 4 * decode_entries(num_seqs, spec.num_kv_heads) * spec.num_heads * (spec.head_dim + 1)
    return 2 * itemsize * num_tokens * activations + partials + LIBRARY_BYTES


def sampler_bytes(vocab_size: int, num_seqs: int, max_model_len: int) -> int:
    """Most temporary bytes of a sampler. Penalties look at every token so far."""
    return 4 * num_seqs * (SAMPLER_ARRAYS * vocab_size + 2 * max_model_len)
