"""Weights in the layout of the native kernels: read into it, or put into it, they are the same numbers."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcb.config import EngineConfig
from jaxcb.errors import ModelError
from jaxcb.models.decoder import init_params
from jaxcb.models.spec import ModelSpec
from jaxcb.weights import load_params, loader, resolve
from jaxcb.weights.panels import in_panels
from jaxcb.weights.quantize import quantize
from pallas_kernels.native import take_rows
from tests.conftest import GOLDEN

SPEC = ModelSpec(
    family="llama",
    vocab_size=70,
    hidden_size=24,
    intermediate_size=40,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=12,
    max_position=64,
    tie_word_embeddings=True,
)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3_moe"])  # tied and not; biases stay as they are; experts
def test_reading_a_file_into_panels_gives_what_putting_its_weights_there_does(name):
    files = resolve(str(GOLDEN / "tiny" / name))
    spec = files.read_spec()
    wanted = in_panels(load_params(files, spec, jnp.dtype("bfloat16")))
    got = load_params(files, spec, jnp.dtype("bfloat16"), layout="panels")
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    starts = sorted(
        (leaf.unsafe_buffer_pointer(), leaf.nbytes) for leaf in jax.tree.leaves(got) if leaf.dtype == jnp.bfloat16
    )
    for (start, size), (following, _) in itertools.pairwise(starts):
        assert following == start + -(-size // 64) * 64, "in one piece of memory"


def test_a_quantized_model_does_not_keep_what_it_was_made_of(builtin_model, monkeypatch):
    """One piece of memory for all that is read would stay as long as the embedding does."""
    monkeypatch.setattr(loader, "Arena", None)
    params = loader.load(EngineConfig(quantization="int8", dtype="bfloat16")).params
    assert params["layers"]["o"]["kernel"].dtype == jnp.int8


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("quantized", [True, False])
def test_every_weight_is_found_again(tied, quantized):
    params = init_params(dataclasses.replace(SPEC, tie_word_embeddings=tied), jnp.bfloat16)
    if quantized:
        params = quantize(params)
    panels = in_panels(params)
    assert in_panels(panels) is panels, "once"

    def rows(kernel, count):
        return take_rows(kernel, np.arange(count))

    there = panels["layers"]
    for index, layer in params["layers"].items():
        for name in ("qkv", "o", "down"):
            kernel = layer[name]["kernel"]
            np.testing.assert_array_equal(rows(there[name]["kernel"][index], len(kernel)), kernel.astype(jnp.float32))
            if quantized:
                np.testing.assert_array_equal(there[name]["scale"][index], layer[name]["scale"])
        both, gated = layer["gate_up"]["kernel"].astype(jnp.float32), there["gate_up"]["kernel"][index]
        np.testing.assert_array_equal(rows(gated[::2], 40), both[:40])
        np.testing.assert_array_equal(rows(gated[1::2], 40), both[40:])
        np.testing.assert_array_equal(there["input_norm"]["scale"][index], layer["input_norm"]["scale"])
    embedding = params["embed"]["embedding"]
    if "lm_head" in params:
        assert panels["embed"]["embedding"] is embedding
        head = params["lm_head"]["kernel"]
        np.testing.assert_array_equal(rows(panels["lm_head"]["kernel"], 70), head.astype(jnp.float32))
    else:
        np.testing.assert_array_equal(rows(panels["embed"]["embedding"], 70), embedding.astype(jnp.float32))


@pytest.mark.parametrize("quantized", [True, False])
def test_every_weight_of_experts_is_found_again(quantized):
    params = init_params(
        dataclasses.replace(SPEC, family="mixtral", num_experts=3, num_experts_per_token=2), jnp.bfloat16
    )
    params = quantize(params) if quantized else params
    there = in_panels(params)["layers"]
    for index, layer in params["layers"].items():
        np.testing.assert_array_equal(
            take_rows(there["router"]["kernel"][index], np.arange(3)), layer["router"]["kernel"]
        )
        for expert in range(3):
            down, both = (layer[name]["kernel"][expert].astype(jnp.float32) for name in ("down", "gate_up"))
            np.testing.assert_array_equal(take_rows(there["down"]["kernel"][index, expert], np.arange(24)), down)
            gated = there["gate_up"]["kernel"][index, expert]
            np.testing.assert_array_equal(take_rows(gated[::2], np.arange(40)), both[:40])
            np.testing.assert_array_equal(take_rows(gated[1::2], np.arange(40)), both[40:])
            if quantized:
                np.testing.assert_array_equal(there["down"]["scale"][index, expert], layer["down"]["scale"][expert])


def test_layers_of_several_dtypes_are_refused():
    params = init_params(SPEC, jnp.bfloat16)
    params["layers"][1]["o"]["kernel"] = params["layers"][1]["o"]["kernel"].astype(jnp.float32)
    with pytest.raises(ModelError, match=r"layers\.1\.o\.kernel is float32, not bfloat16"):
        in_panels(params)


def test_a_head_of_another_dtype_than_the_layers_is_put_in_panels_too():
    params = init_params(dataclasses.replace(SPEC, tie_word_embeddings=False), jnp.bfloat16)
    params["lm_head"]["kernel"] = params["lm_head"]["kernel"].astype(jnp.float32)
    panels = in_panels(params)
    np.testing.assert_array_equal(take_rows(panels["lm_head"]["kernel"], np.arange(70)), params["lm_head"]["kernel"])
