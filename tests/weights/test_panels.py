"""Weights in the layout of the native kernels: read into it, or put into it, they are the same numbers."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcb.config import EngineConfig
from jaxcb.models.decoder import init_params
from jaxcb.models.spec import ModelSpec
from jaxcb.weights import load_params, loader, resolve
from jaxcb.weights.panels import in_panels
from jaxcb.weights.quantize import quantize
from pallas_kernels.native import take_rows
from tests.conftest import GOLDEN


@pytest.mark.parametrize("name", ["llama", "qwen2"])  # tied and not; biases stay as they are
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
    assert params["layers"][0]["o"]["kernel"].dtype == jnp.int8


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("quantized", [True, False])
def test_every_weight_is_found_again(tied, quantized):
    spec = ModelSpec(
        family="llama",
        vocab_size=70,
        hidden_size=24,
        intermediate_size=40,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=12,
        max_position=64,
        tie_word_embeddings=tied,
    )
    params = init_params(spec, jnp.bfloat16)
    if quantized:
        params = quantize(params)
    panels = in_panels(params)
    assert in_panels(panels) is panels, "once"

    def rows(kernel, count):
        return take_rows(kernel, np.arange(count))

    for index, layer in params["layers"].items():
        there = panels["layers"][index]
        for name in ("qkv", "o", "down"):
            kernel = layer[name]["kernel"]
            np.testing.assert_array_equal(rows(there[name]["kernel"], len(kernel)), kernel.astype(jnp.float32))
        both = layer["gate_up"]["kernel"].astype(jnp.float32)
        np.testing.assert_array_equal(rows(there["gate_up"]["kernel"][::2], 40), both[:40])
        np.testing.assert_array_equal(rows(there["gate_up"]["kernel"][1::2], 40), both[40:])
        assert there["input_norm"]["scale"] is layer["input_norm"]["scale"]
    embedding = params["embed"]["embedding"]
    if "lm_head" in params:
        assert panels["embed"]["embedding"] is embedding
        head = params["lm_head"]["kernel"]
        np.testing.assert_array_equal(rows(panels["lm_head"]["kernel"], 70), head.astype(jnp.float32))
    else:
        np.testing.assert_array_equal(rows(panels["embed"]["embedding"], 70), embedding.astype(jnp.float32))
