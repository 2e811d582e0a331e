"""The mosaic kernel in its interpreter, which also watches for races between copies and products (jax >= 0.11)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import mosaic
from tests.pallas_kernels.batches import Batch, attend, ragged_batch, relative_error

OLD = tuple(int(x) for x in jax.__version__.split(".")[:2]) < (0, 11)
needs_interpreter = pytest.mark.skipif(OLD, reason="Mosaic's interpreter is public and complete from jax 0.11 on")


def call(batch: Batch, soft_cap: float | None, interpret: Any) -> Callable[..., jax.Array]:
    return functools.partial(
        attend,
        layer=batch.layer,
        num_layers=batch.num_layers,
        scale=None,
        window=batch.window,
        soft_cap=soft_cap,
        decode_only=batch.decode_only,
        backend="mosaic",
        interpret=interpret,
    )


def run(batch: Batch, soft_cap: float | None, interpret: Any) -> np.ndarray:
    return np.asarray(call(batch, soft_cap, interpret)(*batch.arrays))


def attend_with_races(batch: Batch, soft_cap: float | None = None) -> np.ndarray:
    """The output of the mosaic backend; fails if the interpreter saw a race."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks  # no public way to ask for the races found

    got = run(batch, soft_cap, plgpu.InterpretGPUParams(detect_races=True))
    assert not gpu_callbacks.get_races().races_found
    return got


@needs_interpreter
@pytest.mark.parametrize(
    "heads, head_dim, page_size, window, soft_cap, dtype",
    [
        ((3, 1), 64, 16, None, None, "bfloat16"),
        ((4, 2), 128, 64, 40, 5.0, "bfloat16"),
        ((2, 1), 128, 128, 100, None, "float16"),
        ((2, 1), 256, 32, None, None, "bfloat16"),
    ],
)
def test_chunks_between_decodes(heads, head_dim, page_size, window, soft_cap, dtype):
    """Chunks that end inside a page and a block, a decode among them, padding, NaN wherever nothing may be read."""
    batch = ragged_batch(
        [(7, 70), (1, 130), (40, 90)],
        heads=heads,
        head_dim=head_dim,
        page_size=page_size,
        window=window,
        dtype=dtype,
        num_tokens=52,
        num_seqs=4,
        num_layers=1,
        layer=0,
    )
    got = attend_with_races(batch, soft_cap)
    assert relative_error(got, batch.expected(soft_cap=soft_cap)) < 1e-2
    assert not got[batch.query_starts[-1] :].any(), "padding tokens give 0"


@needs_interpreter
def test_what_it_cannot_do_is_refused():
    batch = ragged_batch([(5, 9)], dtype="bfloat16")
    small = "q must be of head size 64, 128 or 256 for backend mosaic, got 16"
    for wrong, message in (
        (batch, small),
        (dataclasses.replace(batch, q=batch.q.astype(jnp.float32)), "q must be of the pages' dtype bfloat16"),
        (ragged_batch([(5, 9)], sinks=True, dtype="bfloat16"), "sinks must be None for backend mosaic"),
        (ragged_batch([(5, 9)]), "kv_pages must be bfloat16 or float16 for backend mosaic, got float32"),
        (ragged_batch([(5, 9)], dtype="bfloat16", kv_dtype="int8"), "kv_pages must be plain for backend mosaic"),
    ):
        with pytest.raises(ValueError, match=message):
            attend_with_races(wrong)
    fine = ragged_batch([(5, 9)], dtype="bfloat16", head_dim=64)
    with on("NVIDIA A100-SXM4-80GB"), pytest.raises(ValueError, match=r"backend must be .* no Hopper .* got 'mosaic'"):
        jax.eval_shape(call(fine, None, False), *fine.arrays)


@pytest.mark.skipif(not OLD, reason="jax has the API")
def test_it_is_refused_on_older_jax():
    batch = ragged_batch([(5, 9)], dtype="bfloat16", head_dim=64)
    with pytest.raises(ValueError, match=r"backend must be xla or triton on jax before 0\.11, got 'mosaic'"):
        run(batch, None, True)


def on(kind: str) -> Any:
    device = AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("device",), abstract_device=device))


MODEL: dict[str, Any] = {"dtype": "bfloat16", "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16}


@pytest.mark.parametrize(
    "kind, changes, reason",
    [
        ("NVIDIA H200", {}, None),
        ("NVIDIA A100-SXM4-80GB", {}, "it is for GPUs of compute capability 9.0"),
        ("NVIDIA H200", {"dtype": "float32"}, "it computes in bfloat16 or float16, not in float32"),
        ("NVIDIA H200", {"head_dim": 80}, "it takes heads of 64, 128, 256 features, not of 80"),
        ("NVIDIA H200", {"num_heads": 71, "num_kv_heads": 1}, "it takes 64 query heads a KV head, not 71"),
        ("NVIDIA H200", {"head_dim": 256, "page_size": 128}, "it takes pages of at most 64 tokens at head size 256"),
    ],
)
def test_the_reason_why_a_model_cannot_take_it(kind, changes, reason):
    with on(kind):
        found = mosaic.why_not(**MODEL | changes)
    if OLD and "H200" in kind:
        reason = f"it needs jax 0.11, this is {jax.__version__}"
    assert found == reason if reason is None else (found or "").startswith(reason)
    assert "compute capability" in (mosaic.why_not(**MODEL) or ""), "there is no such GPU here"
