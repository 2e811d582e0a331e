"""The triton kernel lowers for a GPU on a machine that has none: what Triton's lowering can't express fails here."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from tests.pallas_kernels.batches import attend


@pytest.mark.parametrize(
    "heads, head_dim, dtype, window, soft_cap, decode_only, one_path",
    [
        ((9, 3), 64, "bfloat16", None, None, False, False),
        ((9, 3), 64, "float32", None, None, True, False),
        ((32, 8), 128, "bfloat16", 1024, 30.0, False, False),
        ((8, 1), 256, "bfloat16", None, None, True, False),
        ((32, 32), 80, "float16", None, None, False, False),
        ((32, 8), 128, "bfloat16", 1024, None, True, True),
    ],
)
def test_ragged_kernel_lowers_for_h200(heads, head_dim, dtype, window, soft_cap, decode_only, one_path):
    num_heads, num_kv_heads = heads
    num_tokens = 16 if decode_only else 64
    shapes = (
        jax.ShapeDtypeStruct((num_tokens, num_heads, head_dim), dtype),
        jax.ShapeDtypeStruct((100 * 2 * 2, 16, num_kv_heads, head_dim), dtype),
        jax.ShapeDtypeStruct((17,), jnp.int32),
        jax.ShapeDtypeStruct((16,), jnp.int32),
        jax.ShapeDtypeStruct((16, 128), jnp.int32),
        None,
    )
    step = functools.partial(
        attend,
        layer=1,
        num_layers=2,
        scale=None,
        window=window,
        soft_cap=soft_cap,
        decode_only=decode_only,
        one_path=one_path,
        backend="triton",
        interpret=False,
        target="h200",
    )
    h200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    mesh = AbstractMesh((1,), ("device",), abstract_device=h200)
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(step).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    kernels = 1 if one_path or decode_only else 2  # tiles of chunks; splits of decodes, merged by the last one
    assert lowered.count("__gpu$xla.gpu.triton") == kernels
    assert "stablehlo.while" not in lowered, "a loop outside the kernel breaks the step's CUDA graph"
