import jax
import jax.numpy as jnp
import pytest

from jaxcb.models import ModelSpec, param_shapes
from jaxcb.step.batch import SlotState, StepLayout
from jaxcb.step.buckets import Bucket
from jaxcb.step.controls import ControlLayout
from jaxcb.step.program import StepProgram
from jaxcb.step.shape import RunnerShape, kv_dtype, kv_shape

SPEC = ModelSpec(
    family="llama",
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=512,
)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("bucket", [Bucket(4, 4, True), Bucket(32, 4, False)], ids=str)
def test_a_compiled_step_updates_the_pool_in_place(bucket, dtype):
    """No temporary is as large as one layer's share of the pool, and the pool's memory is that of the result."""
    layout = StepLayout(bucket, table_width=32, num_slots=8)
    shape = RunnerShape(num_pages=2000, page_size=16, num_slots=8, max_model_len=512)
    kv = jax.ShapeDtypeStruct(kv_shape(SPEC, shape), kv_dtype(jnp.dtype(dtype), "xla"))
    state = jax.eval_shape(lambda: SlotState.at_rest(8, 32, ControlLayout(SPEC.vocab_size, 64)))
    upload = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
    step = jax.jit(StepProgram(SPEC, layout, 16, "xla").forward, donate_argnums=(1, 2))
    memory = step.lower(param_shapes(SPEC, dtype), kv, state, upload).compile().memory_analysis()
    pool = kv.size * kv.dtype.itemsize
    assert memory.alias_size_in_bytes >= pool
    assert memory.temp_size_in_bytes < pool / SPEC.num_layers
