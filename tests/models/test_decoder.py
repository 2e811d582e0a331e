import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from jaxcb import native
from jaxcb.models.decoder import init_params, param_shapes
from jaxcb.models.params import Params
from jaxcb.models.spec import ModelSpec
from jaxcb.weights import load_params, resolve
from tests.conftest import GOLDEN
from tests.step.forward import chunked, teacher_forced


def load(directory: Path, dtype: str) -> tuple[ModelSpec, Params]:
    """Spec and weights of a checkpoint that has no tokenizer."""
    files = resolve(str(directory), None)
    return (spec := files.read_spec()), load_params(files, spec, jnp.dtype(dtype))


@pytest.mark.parametrize("backend", ["xla", pytest.param("native", marks=pytest.mark.native)])
def test_logits_equal_those_of_transformers_at_every_position(tiny_model, backend):
    """EasyDeL#86: the same weights gave another text than the reference. llama_bias mixes three dtypes in its file."""
    spec, params = load(tiny_model, "float32")
    assert backend == "xla" or native.choose(backend, spec, "float32") == backend
    stored = np.load(tiny_model / "logits.npz")
    logits = teacher_forced(spec, params, stored["ids"].tolist(), backend=backend)
    np.testing.assert_allclose(log_softmax(logits, -1), log_softmax(stored["logits"], -1), atol=1e-4)


@pytest.mark.parametrize("chunk", [8, 24])
def test_chunks_of_a_prompt_give_the_logits_of_the_whole(tiny_model, chunk):
    spec, params = load(tiny_model, "float32")
    stored = np.load(tiny_model / "logits.npz")
    ids = stored["ids"].tolist()
    logits = chunked(spec, params, ids, chunk)
    ends = [min(start + chunk, len(ids)) - 1 for start in range(0, len(ids), chunk)]
    np.testing.assert_allclose(log_softmax(logits, -1), log_softmax(stored["logits"][ends], -1), atol=1e-4)


def test_bfloat16_stays_near_float32(tiny_model):
    stored = np.load(tiny_model / "logits.npz")
    spec, params = load(tiny_model, "bfloat16")
    logits = teacher_forced(spec, params, stored["ids"].tolist())
    difference = np.abs(log_softmax(logits, -1) - log_softmax(stored["logits"], -1))
    assert np.median(difference) < 0.05


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("xla", "bfloat16"),
        pytest.param("native", "float32", marks=pytest.mark.native),
        pytest.param("native", "bfloat16", marks=pytest.mark.native),
    ],
)
def test_activations_that_float16_could_not_hold_are_finite_and_right(backend, dtype):
    """vllm#48231, onnxruntime-genai#2444: an MLP's output above 65,504 became infinite and every score NaN. Here the
    last one is all that the final norm sees, so that its size can't change the logits."""
    spec, params = load(GOLDEN / "tiny" / "llama", dtype)
    assert backend == "xla" or native.choose(backend, spec, dtype) == backend
    ids = np.load(GOLDEN / "tiny" / "llama" / "logits.npz")["ids"].tolist()
    layers, index = params["layers"], spec.num_layers - 1

    def scores(size: float) -> np.ndarray:
        last = {**layers[index], "down": {"kernel": layers[index]["down"]["kernel"] * size}}
        logits = teacher_forced(spec, {**params, "layers": {**layers, index: last}}, ids, backend=backend)
        return log_softmax(logits, -1)

    large, larger = scores(2.0**13), scores(2.0**40)
    assert np.isfinite(larger).all() and np.abs(larger - scores(1.0)).max() > 1
    np.testing.assert_allclose(large, larger, atol=0.02 if dtype == "float32" else 0.2)


def test_initialised_parameters_have_the_shapes_that_a_load_promises(tiny_model):
    spec = ModelSpec.from_hf_config(json.loads((tiny_model / "config.json").read_text()))
    shapes = param_shapes(spec, jnp.bfloat16)
    params = init_params(spec, jnp.bfloat16)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(lambda x: (x.shape, x.dtype), shapes)
    assert sum(x.size for x in jax.tree.leaves(shapes)) >= spec.num_params
