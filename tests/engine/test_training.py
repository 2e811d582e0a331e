"""Weights that a training loop holds: shared, swapped between steps, and log-probabilities that it can learn from."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxcb.config import EngineConfig
from jaxcb.engine import Engine
from jaxcb.errors import ConfigError, ModelError
from jaxcb.held_model import HeldModel
from jaxcb.request import FinishReason, Request, SamplingParams
from jaxcb.weights import load
from jaxcb.weights.held import held_params
from tests.engine.conftest import SPEC, sensitive_params
from tests.engine.run import complete
from tests.step.forward import teacher_forced

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5 + i, 9, 60 + i, 7] * 5 for i in range(3)]


@pytest.fixture(scope="module")
def other_params():
    return sensitive_params(SPEC, seed=8)


@pytest.fixture
def engine(make_engines, params) -> Engine:
    """One for the module, with the first weights."""
    made = make_engines()
    made.update_params(params)
    return made


def greedy_by_hand(params, prompt: list[int], count: int = 12) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(np.asarray(teacher_forced(SPEC, params, ids))[-1].argmax()))
    return ids[len(prompt) :]


def test_log_probabilities_of_sampled_tokens_are_those_of_a_teacher_forced_forward(engine, params):
    """What a policy gradient is made of: the ratio of the two is 1."""
    sampling = SamplingParams(temperature=1.0, seed=3, max_tokens=30, logprobs=0, ignore_eos=True)
    for output in complete(engine, PROMPTS, sampling):
        ids = [*output.prompt_token_ids, *output.token_ids]
        logits = np.asarray(teacher_forced(SPEC, params, ids))[len(output.prompt_token_ids) - 1 : -1]
        wanted = np.asarray(jax.nn.log_softmax(jnp.asarray(logits)))[np.arange(30), output.token_ids]
        np.testing.assert_allclose(output.logprobs.logprobs, wanted, atol=1e-4)


@pytest.mark.parametrize("backend", ["xla", pytest.param("native", marks=pytest.mark.native)])
def test_the_caller_s_arrays_are_the_engine_s(params, backend):
    """The native kernels have a layout of their own for the layers and for what is multiplied."""
    model = load(EngineConfig(model=(SPEC, params), backend=backend))
    theirs = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)}
    shared = [leaf.unsafe_buffer_pointer() in theirs for leaf in jax.tree.leaves(model.params)]
    if backend == "xla":
        assert all(shared) and len(shared) == len(theirs)
    else:
        assert shared.count(True) == 2, "the embedding, of which rows are taken, and the final norm"


@pytest.mark.native
def test_a_head_of_another_dtype_is_multiplied_in_its_own(engine, params):
    """A float32 head on bfloat16 layers, as some training keeps it. Weights of one dtype aren't swapped for such."""
    halves = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim == 2 else x, params)
    mixed = halves | {"lm_head": params["lm_head"]}
    widened = jax.tree.map(lambda x: x.astype(jnp.float32), mixed)
    got, wanted = (teacher_forced(SPEC, held, PROMPTS[0], backend="native") for held in (mixed, widened))
    assert np.abs(got - wanted).max() < 0.05 * np.abs(wanted).max(), "keys and values alone are rounded"
    with pytest.raises(ModelError, match=r"must be float32"):
        engine.update_params(mixed)


def test_a_held_model_without_a_tokenizer_and_what_is_refused(params):
    model = load(EngineConfig(model=(SPEC, params)))
    assert model.spec is SPEC and model.tokenizer.decode([5, 6]) == ""
    with pytest.raises(ModelError, match="ModelSpec"):
        load(EngineConfig(model=("llama", params)))
    with pytest.raises(ModelError, match="dtype"):
        load(EngineConfig(model=HeldModel(SPEC, params), dtype="bfloat16"))


def test_new_weights_hold_from_the_next_step_on_and_no_prefix_outlives_them(engine, params, other_params):
    before = [output.token_ids for output in complete(engine, PROMPTS, GREEDY)]
    engine.update_params(other_params)
    cached = engine.stats().prompt_tokens_cached
    after = [output.token_ids for output in complete(engine, PROMPTS, GREEDY)]
    assert engine.stats().prompt_tokens_cached == cached
    assert after == [greedy_by_hand(other_params, prompt) for prompt in PROMPTS] != before
    engine.update_params(params)
    assert [output.token_ids for output in complete(engine, PROMPTS, GREEDY)] == before


@pytest.mark.parametrize("running", ["restart", "keep"])
def test_requests_that_run_go_on(engine, other_params, running):
    long = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    stream = engine.submit(Request(request_id="long", prompt_token_ids=PROMPTS[0], sampling=long))
    while len(next(stream).token_ids) < 5:
        pass
    engine.update_params(other_params, running=running)
    known = None
    for output in stream:
        known = known or output
    assert output.finish_reason is FinishReason.LENGTH and len(output.token_ids) == 400
    assert output.num_preemptions == (1 if running == "restart" else 0)
    if running == "restart":  # the last tokens come from the new weights alone
        ids = [*PROMPTS[0], *output.token_ids[:380]]
        assert list(output.token_ids[380:390]) == greedy_by_hand(other_params, ids, 10)
    [fresh] = complete(engine, [PROMPTS[0]], GREEDY)
    assert fresh.token_ids == greedy_by_hand(other_params, PROMPTS[0])


def test_arrays_may_go_while_no_request_runs(engine, params):
    """A training step that donates the old parameters deletes them before the engine has the new ones."""
    before = [output.token_ids for output in complete(engine, PROMPTS, GREEDY)]
    mine = jax.tree.map(lambda x: x + 0, params)
    engine.update_params(mine)
    complete(engine, PROMPTS, GREEDY)
    for array in jax.tree.leaves(mine):
        array.delete()
    engine.update_params(params)
    assert [output.token_ids for output in complete(engine, PROMPTS, GREEDY)] == before


def test_asleep_it_has_no_kv_memory_and_awake_it_goes_on(engine):
    before = [output.token_ids for output in complete(engine, PROMPTS, GREEDY)]
    long = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
    stream = engine.submit(Request(request_id="long", prompt_token_ids=PROMPTS[0], sampling=long))
    while not next(stream).token_ids:
        pass
    engine.sleep()
    engine.sleep()
    assert engine._runner._kv.is_deleted()
    waiting = engine.submit(Request(request_id="waits", prompt_token_ids=PROMPTS[1], sampling=GREEDY))
    engine.resume()  # an admin's; it is still asleep
    assert engine.stats().num_running == 0
    engine.wake()
    engine.wake()
    assert [list(waiting)[-1].token_ids, [*stream][-1].token_ids[:12]] == [before[1], before[0]]
    assert engine.stats().kv_pages_used == 0


def test_an_engine_shuts_down_asleep(make_engine):
    engine = make_engine()
    engine.sleep()
    stream = engine.submit(Request(request_id="waits", prompt_token_ids=[5], sampling=GREEDY))
    engine.shutdown()
    assert list(stream)[-1].finish_reason is FinishReason.ABORT


def test_parameters_of_another_shape_are_refused_by_name(engine, params):
    wrong = jax.tree.map(lambda x: x, params)
    wrong["layers"][1]["down"]["kernel"] = wrong["layers"][1]["down"]["kernel"][:, :-1]
    with pytest.raises(ModelError, match=r"layers\.1\.down\.kernel"):
        engine.update_params(wrong)
    for change, reason in (
        (lambda layer: layer.pop("down"), r"no layers\.1\.down\.kernel"),
        (lambda layer: layer["down"].update(bias=jnp.zeros(48)), r"hold layers\.1\.down\.bias"),
        (lambda layer: layer.update(lora={"a": jnp.zeros(3)}), r"hold layers\.1\.lora\.a"),
    ):
        wrong = jax.tree.map(lambda x: x, params)
        change(wrong["layers"][1])
        with pytest.raises(ModelError, match=reason):
            engine.update_params(wrong)
    donated = jax.tree.map(lambda x: x + 0, params)
    donated["layers"][1]["down"]["kernel"].delete()
    with pytest.raises(ModelError, match=r"layers\.1\.down\.kernel has been deleted"):
        engine.update_params(donated)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    with pytest.raises(ModelError, match="float32"):
        engine.update_params(half)
    with pytest.raises(ConfigError, match="running"):
        engine.update_params(params, running="stop")
    assert complete(engine, [PROMPTS[0]], GREEDY)[0].token_ids == greedy_by_hand(params, PROMPTS[0])


class Attention(nnx.Module):
    def __init__(self, rngs):
        E, Q, K = SPEC.hidden_size, SPEC.q_size, SPEC.kv_size
        self.q_proj, self.k_proj, self.v_proj = (nnx.Linear(E, size, use_bias=False, rngs=rngs) for size in (Q, K, K))
        self.o_proj = nnx.Linear(Q, E, use_bias=False, rngs=rngs)


class MLP(nnx.Module):
    def __init__(self, rngs):
        E, F = SPEC.hidden_size, SPEC.intermediate_size
        self.gate_proj, self.up_proj = (nnx.Linear(E, F, use_bias=False, rngs=rngs) for _ in range(2))
        self.down_proj = nnx.Linear(F, E, use_bias=False, rngs=rngs)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.self_attn, self.mlp = Attention(rngs), MLP(rngs)
        self.input_layernorm = nnx.RMSNorm(SPEC.hidden_size, rngs=rngs)
        self.post_attention_layernorm = nnx.RMSNorm(SPEC.hidden_size, rngs=rngs)


class TheirModel(nnx.Module):
    """As users write it: flax layers under the names of the checkpoint."""

    def __init__(self, rngs):
        self.embed_tokens = nnx.Embed(SPEC.vocab_size, SPEC.hidden_size, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(SPEC.num_layers)])
        self.norm = nnx.RMSNorm(SPEC.hidden_size, rngs=rngs)
        self.lm_head = nnx.Linear(SPEC.hidden_size, SPEC.vocab_size, use_bias=False, rngs=rngs)


def test_an_nnx_model_of_the_user_s_loads_by_the_names_of_its_parameters():
    model = TheirModel(nnx.Rngs(0))
    params = held_params(SPEC, model)
    attention = model.layers[1].self_attn
    kernels = [getattr(attention, name).kernel[...].T for name in ("q_proj", "k_proj", "v_proj")]
    np.testing.assert_array_equal(params["layers"][1]["qkv"]["kernel"], np.concatenate(kernels))
    np.testing.assert_array_equal(params["layers"][0]["down"]["kernel"], model.layers[0].mlp.down_proj.kernel[...].T)
    np.testing.assert_array_equal(params["embed"]["embedding"], model.embed_tokens.embedding[...])
    np.testing.assert_array_equal(params["lm_head"]["kernel"], model.lm_head.kernel[...].T)
    model.layers[0].self_attn.q_norm = nnx.RMSNorm(SPEC.head_dim, rngs=nnx.Rngs(0))
    with pytest.raises(ModelError, match=r"hold layers\.0\.self_attn\.q_norm\.weight"):
        held_params(SPEC, model)
    del model.layers[0].self_attn.q_norm
    del model.layers[1].mlp.up_proj
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        held_params(SPEC, model)
