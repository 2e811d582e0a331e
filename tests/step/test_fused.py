"""The decoder for GPUs, its kernels in Pallas's interpreter, against the plain one."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from jaxcb.models import ModelSpec
from jaxcb.models.decoder import init_params
from jaxcb.models.fused import fold_norms
from jaxcb.models.params import Params
from tests.models.test_decoder import load
from tests.step.forward import teacher_forced

EVERYTHING = ModelSpec(
    family="llama",
    vocab_size=64,
    hidden_size=24,
    intermediate_size=40,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=64,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    qk_norm=True,
    tie_word_embeddings=True,
    windows=(8,),
)
"""A spec with every switch on at once; no family has them all."""
IDS = np.random.default_rng(0).integers(0, 64, 33).tolist()
"""In chunks of 16 two go the way of chunks, and the last token that of decodes."""


@pytest.fixture(scope="module")
def params() -> Params:
    """Random, scales of norms and biases too."""
    rng = np.random.default_rng(1)

    def drawn(path, array):
        if path[-1].key in ("scale", "bias"):
            return jnp.asarray(rng.standard_normal(array.shape) * 0.5 + 1, array.dtype)
        return array * 40 if path[-1].key == "embedding" else array

    return jax.tree_util.tree_map_with_path(drawn, init_params(EVERYTHING, jnp.float32, seed=2))


@pytest.fixture(scope="module")
def plain(params) -> np.ndarray:
    return teacher_forced(EVERYTHING, params, IDS, chunk=16)


@pytest.mark.parametrize(("chunk", "fast_norm"), [(16, False), (1, False), (1, True)])
def test_the_fused_layers_give_the_logits_of_the_plain_ones(params, plain, chunk, fast_norm):
    """Biases, norms of heads, a window; prompt chunks and a single token after them, and decodes alone."""
    own = fold_norms(params) if fast_norm else params
    fused = teacher_forced(EVERYTHING, own, IDS, chunk=chunk, backend="triton", fast_norm=fast_norm)
    np.testing.assert_allclose(log_softmax(fused, -1), log_softmax(plain, -1), atol=1e-4)
    assert np.array_equal(fused.argmax(-1), plain.argmax(-1))


def test_the_cases_can_tell_a_switch_that_is_not_honoured(params, plain):
    """Without any one of its parts the model answers something else, by far more than the tolerance above."""
    for name in ("q_norm", "k_norm", "input_norm", "post_norm"):
        layers = {i: {**layer, name: {"scale": layer[name]["scale"] * 1.1}} for i, layer in params["layers"].items()}
        assert np.abs(teacher_forced(EVERYTHING, {**params, "layers": layers}, IDS, chunk=16) - plain).max() > 1e-2
    for name in ("qkv", "o", "gate_up", "down"):
        layers = {
            i: {**layer, name: {**layer[name], "bias": 0 * layer[name]["bias"]}}
            for i, layer in params["layers"].items()
        }
        assert np.abs(teacher_forced(EVERYTHING, {**params, "layers": layers}, IDS, chunk=16) - plain).max() > 1e-2


def test_experts_of_the_fused_layers_are_those_of_the_plain_ones():
    spec = dataclasses.replace(
        EVERYTHING, family="mixtral", mlp_bias=False, num_experts=5, num_experts_per_token=2, norm_expert_weights=False
    )
    params = init_params(spec, jnp.float32, seed=2)
    plain, fused = (teacher_forced(spec, params, IDS[:17], chunk=16, backend=backend) for backend in ("xla", "triton"))
    np.testing.assert_allclose(log_softmax(fused, -1), log_softmax(plain, -1), atol=1e-4)
    assert np.ptp(plain, axis=0).max() > 0.1


@pytest.mark.slow
def test_logits_of_every_family_equal_those_of_transformers(tiny_model):
    spec, params = load(tiny_model, "float32")
    stored = np.load(tiny_model / "logits.npz")
    logits = teacher_forced(spec, params, stored["ids"].tolist(), chunk=64, backend="triton")
    np.testing.assert_allclose(log_softmax(logits, -1), log_softmax(stored["logits"], -1), atol=1e-4)


def test_fast_norm_rounds_no_worse_than_the_exact_norm(params, plain):
    """In bfloat16, against float32 on the same weights. Figures of a real model: bench/README.md."""
    rounded = jax.tree_util.tree_map_with_path(
        lambda path, array: array if path[-1].key == "scale" else array.astype(jnp.bfloat16), params
    )
    exact, fast = (
        log_softmax(teacher_forced(EVERYTHING, own, IDS, chunk=1, backend="triton", fast_norm=fast_norm), -1)
        for own, fast_norm in ((rounded, False), (fold_norms(rounded), True))
    )
    want = log_softmax(teacher_forced(EVERYTHING, jax.tree.map(lambda x: x.astype(jnp.float32), rounded), IDS, 16), -1)
    errors = [np.abs(got - want).mean() for got in (exact, fast)]
    assert np.abs(fast - exact).mean() > 0, "they are different computations"
    assert errors[1] < 1.5 * errors[0]
