import dataclasses
import os
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxcb.config import EngineConfig
from jaxcb.engine import gpu_memory, sizing
from jaxcb.engine.gpu_memory import (
    FRAGMENTS_BYTES,
    HOST_GIB,
    HOST_VARIABLE,
    VARIABLES,
    Sizes,
    allowed_bytes,
    measure,
    start_jax,
)
from jaxcb.engine.sizing import limits_of, resolve_config
from jaxcb.errors import ConfigError
from jaxcb.sizing import (
    CPU_DECODE_BUCKETS,
    CPU_MIXED_BUCKETS,
    GPU_DECODE_BUCKETS,
    GPU_MIXED_BUCKETS,
    batch_limits,
    decode_sizes,
    fills_exactly,
    logprobs_bytes,
    mixed_sizes,
)
from tests.engine.conftest import SPEC


@pytest.mark.parametrize(
    ("backend", "asked", "filled"),
    [
        ("xla", None, True),
        pytest.param("native", None, False, marks=pytest.mark.native),
        ("xla", False, False),
        pytest.param("native", True, True, marks=pytest.mark.native),
    ],
)
def test_chunks_are_trimmed_where_padding_costs_something_unless_told(backend, asked, filled):
    config = EngineConfig(backend=backend, exact_fill=asked, max_model_len=256, num_kv_pages=64)
    resolved = resolve_config(config, SPEC, jnp.dtype("float32"))
    assert resolved.exact_fill is filled
    limits = limits_of(resolved, SPEC)
    assert limits.exact_fill is filled
    assert limits.step_sizes == ((64, 128, 256, 384, 512) if filled or backend == "xla" else ())


def test_whole_prompts_are_not_trimmed():
    assert not fills_exactly(EngineConfig(enable_chunked_prefill=False), padding_costs=True)
    with pytest.raises(ConfigError, match="exact_fill"):
        EngineConfig(enable_chunked_prefill=False, exact_fill=True)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_an_engine_with_default_settings_has_at_most_16_forward_programs(on_cpu):
    config = EngineConfig()
    batch = batch_limits(config, 8192, on_cpu=on_cpu)
    decode = decode_sizes(config, batch.num_seqs, on_cpu=on_cpu)
    mixed = mixed_sizes(config, batch.num_tokens, on_cpu=on_cpu)
    assert len(decode) + 1 + len(mixed) + 1 <= 16
    assert max(decode) < batch.num_seqs and max(mixed) < batch.num_tokens
    assert set(decode) <= {*CPU_DECODE_BUCKETS, *GPU_DECODE_BUCKETS}
    assert set(mixed) <= {*CPU_MIXED_BUCKETS, *GPU_MIXED_BUCKETS}


@pytest.fixture(autouse=True)
def started_by_nobody(monkeypatch):
    """As if no engine of this process had started jax."""
    monkeypatch.setattr(gpu_memory, "_started", gpu_memory.DEFAULT_FRACTION)


def gpu(monkeypatch, **stats: int) -> None:
    """As if jax had a GPU that says so of its memory."""
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(memory_stats=lambda: stats)])


def sizes(**changes: Any) -> Sizes:
    return Sizes(
        **({"spec": SPEC, "num_seqs": 16, "num_tokens": 64, "max_model_len": 128} | changes), page_size=16, itemsize=2
    )


def test_on_a_gpu_the_cache_takes_what_everything_else_leaves(monkeypatch):
    gpu(monkeypatch, bytes_limit=2 * 10**9, bytes_in_use=3 * 10**8)
    memory = measure(0.75, sizes())
    left = 2 * 10**9 - 3 * 10**8 - memory.state - memory.programs - FRAGMENTS_BYTES
    config = EngineConfig()
    assert sizing._num_pages(config, 1000, 10**9, memory) == left // 1000
    assert sizing._num_pages(config, 1000, 7, memory) == 7, "no more than max_num_seqs full sequences need"
    assert memory.programs > logprobs_bytes(SPEC.vocab_size, 16)
    with pytest.raises(
        ConfigError, match=r"no page of 16 tokens, .* bytes: of 2.00 GB .*, 0.30 GB for weights.* Raise"
    ):
        sizing._num_pages(config, left + 1, 10**9, memory)


def test_more_rows_tokens_or_context_leave_less_for_pages(monkeypatch):
    gpu(monkeypatch, bytes_limit=10**10, bytes_in_use=0)
    least = measure(0.75, sizes()).for_pages
    for change in ({"num_seqs": 32}, {"num_tokens": 10**5}, {"max_model_len": 256}):
        assert measure(0.75, sizes(**change)).for_pages < least


@pytest.mark.parametrize(
    ("variable", "utilization", "allowed"),
    [(None, 0.9, 75), (None, 0.5, 50), ("0.75", 0.5, 50), ("0.9", 0.45, 37), ("0.5", 0.9, 75)],
)
def test_the_utilization_is_a_part_of_the_whole_gpu(monkeypatch, variable, utilization, allowed):
    """jax may take 75 bytes; of how many, its variable says, or its default of three quarters."""
    monkeypatch.delenv(VARIABLES[1], raising=False)
    monkeypatch.delenv(VARIABLES[0], raising=False)
    if variable is not None:
        monkeypatch.setenv(VARIABLES[0], variable)
    assert allowed_bytes(75, utilization) == allowed


def test_a_jax_that_runs_already_keeps_its_part_of_the_gpu(monkeypatch):
    """A script used jax before it made an engine: three quarters are what jax holds, whatever the engine asks for."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    jax.devices()
    start_jax(0.5)
    assert allowed_bytes(75, 0.5) == 50


def test_jax_is_started_with_the_engines_part_of_the_gpu(monkeypatch):
    monkeypatch.setattr(gpu_memory, "backends_are_initialized", lambda: False)
    seen = []
    monkeypatch.setattr(jax, "devices", lambda: seen.append(os.environ[VARIABLES[0]]))
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    start_jax(0.92)
    assert seen == ["0.9200"] and VARIABLES[0] not in os.environ
    assert allowed_bytes(92, 0.92) == 92 and allowed_bytes(92, 0.46) == 46
    monkeypatch.setenv(VARIABLES[1], "0.3")
    start_jax(0.5)
    assert seen == ["0.9200"], "a user's own setting stands"


def test_jax_may_pin_the_host_memory_that_the_engines_keep_pages_in(monkeypatch):
    monkeypatch.setattr(gpu_memory, "backends_are_initialized", lambda: False)
    seen = []
    monkeypatch.setattr(jax, "devices", lambda: seen.append(os.environ.get(HOST_VARIABLE)))
    monkeypatch.setenv(VARIABLES[0], "0.3")
    monkeypatch.delenv(HOST_VARIABLE, raising=False)
    start_jax(0.5, 100.5)
    assert seen == [str(HOST_GIB + 101)] and HOST_VARIABLE not in os.environ
    monkeypatch.setenv(HOST_VARIABLE, "7")
    start_jax(0.5, 100.5)
    assert len(seen) == 1, "a user's own setting stands"


def test_an_allocator_without_an_account_is_told_of(monkeypatch):
    gpu(monkeypatch)
    with pytest.raises(ConfigError, match="give --kv-cache-memory-bytes or --num-kv-pages"):
        measure(0.9, sizes())


def test_fast_norm_is_refused_where_it_is_not_honoured():
    with pytest.raises(ConfigError, match="fast_norm is for the kernels of backend triton, not for backend xla"):
        resolve_config(EngineConfig(backend="xla", fast_norm=True), SPEC, jnp.dtype("float32"))
    with pytest.raises(ConfigError, match="not for deterministic"):
        resolve_config(EngineConfig(backend="triton", fast_norm=True, deterministic=True), SPEC, jnp.dtype("float32"))
    experts = dataclasses.replace(SPEC, family="mixtral", num_experts=4, num_experts_per_token=2)
    with pytest.raises(ConfigError, match="fast_norm is for models without experts"):
        resolve_config(EngineConfig(backend="triton", fast_norm=True), experts, jnp.dtype("float32"))
    assert resolve_config(EngineConfig(backend="triton", fast_norm=True), SPEC, jnp.dtype("float32")).fast_norm


def test_in_the_interpreter_the_gpu_kernels_are_for_float32():
    with pytest.raises(ConfigError, match="in an interpreter on a CPU, for tests, and in float32 only, got bfloat16"):
        resolve_config(EngineConfig(backend="triton"), SPEC, jnp.dtype("bfloat16"))


def test_mosaic_is_refused_with_the_reason():
    on_cpu = r"backend mosaic can't be used: it is for GPUs of compute capability 9\.0 \(Hopper\); take triton"
    with pytest.raises(ConfigError, match=on_cpu):
        resolve_config(EngineConfig(backend="mosaic"), SPEC, jnp.dtype("bfloat16"))
    with pytest.raises(ConfigError, match="backend mosaic can't be used: deterministic attends to single tokens"):
        resolve_config(EngineConfig(backend="mosaic", deterministic=True), SPEC, jnp.dtype("bfloat16"))
