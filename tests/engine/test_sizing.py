import jax.numpy as jnp
import pytest

from jaxcb.config import EngineConfig
from jaxcb.engine import sizing
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


def test_on_a_gpu_the_cache_takes_what_log_probabilities_leave(monkeypatch):
    monkeypatch.setattr(sizing, "_free_gpu_bytes", lambda utilization: int(1e9 * utilization))

    def pages(**rows: int) -> int:
        config = EngineConfig(gpu_memory_utilization=0.5)
        return sizing._num_pages(config, 1000, 10**9, on_cpu=False, **rows)

    assert pages(vocab_size=1000, num_seqs=16) == (500_000_000 - logprobs_bytes(1000, 16)) // 1000
    assert pages(vocab_size=50_000, num_seqs=256) < pages(vocab_size=50_000, num_seqs=16) < 500_000
    with pytest.raises(ConfigError, match="holds no page"):
        pages(vocab_size=1_000_000, num_seqs=256)


def test_fast_norm_is_refused_where_it_is_not_honoured():
    with pytest.raises(ConfigError, match="fast_norm is for the kernels of backend triton, not for backend xla"):
        resolve_config(EngineConfig(backend="xla", fast_norm=True), SPEC, jnp.dtype("float32"))
    with pytest.raises(ConfigError, match="not for deterministic"):
        resolve_config(EngineConfig(backend="triton", fast_norm=True, deterministic=True), SPEC, jnp.dtype("float32"))
    assert resolve_config(EngineConfig(backend="triton", fast_norm=True), SPEC, jnp.dtype("float32")).fast_norm


def test_in_the_interpreter_the_gpu_kernels_are_for_float32():
    with pytest.raises(ConfigError, match="in an interpreter on a CPU, for tests, and in float32 only, got bfloat16"):
        resolve_config(EngineConfig(backend="triton"), SPEC, jnp.dtype("bfloat16"))
