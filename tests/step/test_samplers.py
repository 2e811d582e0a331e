"""The memory of log-probabilities is what their programs take; masks forbid what they say; no token leaves no trace."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcb.devices import AXIS
from jaxcb.models import ModelSpec
from jaxcb.models.decoder import param_shapes
from jaxcb.models.parallel import TensorParallel
from jaxcb.sampling import Tier
from jaxcb.sampling.sampler import NOTHING
from jaxcb.sizing import PROMPT_ROWS, logprobs_bytes
from jaxcb.step.batch import SlotState, sample_size
from jaxcb.step.controls import ControlLayout
from jaxcb.step.program import mask_logits, mask_some_logits, prompt_logprobs, sample_step, token_logprobs

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


def test_a_mask_forbids_the_ids_whose_bits_are_0():
    V = 70
    bits = np.random.default_rng(0).integers(0, 2, (3, 96)).astype(np.uint8)
    mask = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    logits = np.asarray(mask_logits(jnp.ones((3, V), jnp.bfloat16), jnp.asarray(mask)))
    assert ((logits == 1) == bits[:, :V]).all() and np.isneginf(logits[bits[:, :V] == 0].astype(np.float32)).all()


def test_masks_of_some_rows_leave_the_others_alone():
    V, rng = 70, np.random.default_rng(1)
    bits = rng.integers(0, 2, (4, 96)).astype(np.uint8)
    mask = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    logits = rng.standard_normal((6, V)).astype(np.float32)
    wanted = logits.copy()
    for row, allowed in ((5, bits[0]), (2, bits[1])):
        wanted[row, allowed[:V] == 0] = -np.inf
    masked = mask_some_logits(jnp.asarray(logits), jnp.array([5, 2, 6, 6]), jnp.asarray(mask))
    np.testing.assert_array_equal(np.asarray(masked), wanted)


@pytest.mark.parametrize("apart", [True, False])
def test_devices_of_several_hosts_go_on_from_the_token_that_the_first_has_sampled(apart: bool):
    """Their logits are the same, and what each host has compiled may round differently."""
    state = SlotState.at_rest(2, 1, ControlLayout(vocab_size=40, max_model_len=8))
    part, logits = jnp.zeros(sample_size(1), jnp.int32), jax.nn.one_hot(jnp.array([[7], [9]]), 40)  # of two devices
    sample = functools.partial(
        sample_step, state, part=part, tier=Tier.GREEDY, keep_logits=False, parallel=TensorParallel(2, apart=apart)
    )
    result = jax.jit(jax.vmap(sample, axis_name=AXIS))(logits)
    assert result.token_ids.tolist() == [[7], [7 if apart else 9]]
    assert result.state.last_token[:, 0].tolist() == [7, 7 if apart else 9]


@pytest.mark.parametrize("tier", [Tier.GREEDY, Tier.FULL])
def test_no_token_is_left_in_the_slot_as_an_id_that_the_model_can_read(tier):
    """It would be the next step's, which may be launched already."""
    layout = ControlLayout(vocab_size=40, max_model_len=8)
    state = SlotState.at_rest(2, 1, layout)
    part = jnp.zeros(sample_size(2), jnp.int32)
    result = sample_step(state, jnp.full((2, 40), -jnp.inf), part, tier=tier, keep_logits=False)
    assert (np.asarray(result.token_ids) == NOTHING).all()
    assert (np.asarray(result.state.last_token) >= 0).all()
