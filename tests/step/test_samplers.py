"""The memory of log-probabilities: what is reserved for them is what their programs take."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from jaxcb.models import ModelSpec
from jaxcb.models.decoder import param_shapes
from jaxcb.sizing import PROMPT_ROWS, logprobs_bytes
from jaxcb.step.program import prompt_logprobs, token_logprobs

SPEC = ModelSpec(
    family="llama",
    vocab_size=20_000,
    hidden_size=16,
    intermediate_size=16,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=16,
    max_position=64,
)


@pytest.mark.parametrize("every", [False, True])
def test_what_is_reserved_is_what_the_programs_take(every):
    S, count = 32, jax.ShapeDtypeStruct((), jnp.int32)
    logits, ids = jax.ShapeDtypeStruct((S, SPEC.vocab_size), jnp.float32), jax.ShapeDtypeStruct((S,), jnp.int32)
    rows = jax.ShapeDtypeStruct((PROMPT_ROWS,), jnp.int32)
    hidden = jax.ShapeDtypeStruct((128, SPEC.hidden_size), jnp.float32)
    tokens = jax.jit(functools.partial(token_logprobs, every=every)).lower(logits, ids, count).compile()
    prompt = (
        jax.jit(functools.partial(prompt_logprobs, SPEC, "xla", every=every))
        .lower(param_shapes(SPEC, "float32"), hidden, rows, rows, count)
        .compile()
    )
    taken = []
    for program, num_in_flight in ((tokens, 2), (prompt, 1)):
        memory = program.memory_analysis()
        taken.append(num_in_flight * memory.output_size_in_bytes + memory.temp_size_in_bytes)
    assert sum(taken) <= logprobs_bytes(SPEC.vocab_size, S)
    assert not every or sum(taken) > logprobs_bytes(SPEC.vocab_size, S) / 3, "no more is reserved than makes sense"
