import dataclasses
import json

import pytest

from jaxcb.errors import ModelError
from jaxcb.models.spec import ModelSpec

from ..conftest import GOLDEN

BASE = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def spec(**changes) -> ModelSpec:
    config = BASE | changes
    return ModelSpec.from_hf_config({key: value for key, value in config.items() if value is not ...})


def test_what_a_config_leaves_out_has_the_defaults_of_transformers():
    llama = spec()
    assert (llama.num_kv_heads, llama.head_dim, llama.rms_norm_eps) == (4, 16, 1e-6)
    assert (llama.rope.theta, llama.rope.kind) == (10_000.0, "default")
    assert not (llama.tie_word_embeddings or llama.qkv_bias or llama.qk_norm)
    assert llama.windows == (None, None)
    assert spec(model_type="qwen3").head_dim == 128


MOE = {"model_type": "qwen3_moe", "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
MIXTRAL = {"model_type": "mixtral", "num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2}


def test_experts_are_read_under_the_names_of_their_family():
    mixtral, qwen = spec(**MIXTRAL), spec(**MOE)
    assert (mixtral.num_experts, mixtral.num_experts_per_token, mixtral.intermediate_size) == (4, 2, 96)
    assert (qwen.num_experts, qwen.num_experts_per_token, qwen.intermediate_size) == (8, 2, 32)
    assert mixtral.norm_expert_weights and not qwen.norm_expert_weights, "transformers' defaults"
    assert spec(**MOE, norm_topk_prob=True).norm_expert_weights
    assert (qwen.qk_norm, mixtral.qk_norm, spec(**MOE, attention_bias=True).o_bias) == (True, False, True)
    assert spec(**(MOE | {"num_experts": ..., "num_local_experts": 6})).num_experts == 6
    assert (spec().num_experts, spec().expert_share, qwen.expert_share) == (0, 1.0, 0.25)


def test_what_a_mixtral_leaves_out_has_defaults_of_its_own():
    found = spec(**(MIXTRAL | {"num_attention_heads": 16, "num_key_value_heads": ...}))
    assert (found.num_kv_heads, found.rms_norm_eps, found.rope.theta, found.windows) == (8, 1e-5, 1e6, (None, None))
    assert spec(**MIXTRAL, sliding_window=8).windows == (8, 8)


@pytest.mark.parametrize(
    "config, windows",
    [
        ({"model_type": "mistral", "sliding_window": 8}, (8, 8)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None)),
        ({"model_type": "mistral"}, (4096, 4096)),
        ({"model_type": "mistral", "sliding_window": 8, "use_sliding_window": False}, (8, 8)),
        ({"model_type": "llama", "sliding_window": 8}, (None, None)),
        ({"model_type": "qwen2", "sliding_window": 8}, (None, None)),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True}, (None, None)),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (None, 8)),
        (MOE | {"sliding_window": 8}, (None, None)),
        (MOE | {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (8, 8)),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (8, None),
        ),
    ],
)
def test_windows_are_those_of_transformers(config, windows):
    """vllm#3377: a config that carries a window and switches it off was taken for a windowed one."""
    assert spec(**config).windows == windows


@pytest.mark.parametrize(
    "family, attention_bias, expected",
    [
        ("llama", False, (False, False)),
        ("llama", True, (True, True)),
        ("mistral", True, (False, False)),
        ("qwen2", False, (True, False)),
        ("qwen3", True, (True, True)),
    ],
)
def test_biases_are_those_of_transformers(family, attention_bias, expected):
    found = spec(model_type=family, attention_bias=attention_bias)
    assert (found.qkv_bias, found.o_bias) == expected


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_old_and_new_rope_keys_mean_the_same(key, place):
    rope = spec(**{place: {key: "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, "rope_theta": 5e5}).rope
    assert (rope.kind, rope.factor, rope.original_max_position, rope.theta) == ("yarn", 4.0, 64, 5e5)


def test_theta_may_stand_among_the_rope_parameters():
    assert spec(rope_parameters={"rope_type": "default", "rope_theta": 7.0}, rope_theta=...).rope.theta == 7.0


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(gptq\) is not supported"),
        ({"num_hidden_layers": ...}, "num_hidden_layers must be int, got None"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers must be int, got '2'"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be int, got True"),
        (MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step other than 1 is not supported, got 2"),
        (MOE | {"mlp_only_layers": [1]}, r"mlp_only_layers is not supported, got \[1\]"),
        (MOE | {"num_experts": ...}, "num_local_experts must be int, got None"),
        (MOE | {"num_experts": 0}, "num_experts must be positive, got 0"),
        (MOE | {"num_experts_per_tok": 9}, r"num_experts_per_tok must be from 1 to the number of experts \(8\), got 9"),
        (MOE | {"num_experts_per_tok": 0}, "num_experts_per_tok must be from 1 to"),
        (MOE | {"moe_intermediate_size": ...}, "moe_intermediate_size must be int, got None"),
        (MOE | {"norm_topk_prob": "yes"}, "norm_topk_prob must be true or false, got 'yes'"),
        ({"model_type": "qwen2_moe"}, "model_type 'qwen2_moe' is not supported"),
        ({"num_attention_heads": 0}, "num_heads must be positive, got 0"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be a multiple of num_key_value_heads \(3\)"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads must be int, got '2'"),
        ({"head_dim": 15}, "head_dim must be even, got 15"),
        ({"head_dim": -2}, "head_dim must be positive, got -2"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number, got 'small'"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be an integer"),
        ({"rope_theta": "1e6"}, "rope_theta must be a number"),
        ({"rope_scaling": {"rope_type": "zigzag", "factor": 2.0}}, "rope_scaling type 'zigzag' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' needs a number 'factor', got None"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "needs original_max_position_embeddings"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}}, "'mscale' is not supported"),
        ({"rope_scaling": ["linear"]}, "rope_scaling must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window must be a positive integer, got 0"),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["full_attention", "chunked_attention"]},
            "'chunked_attention'",
        ),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["full_attention"]},
            "layer_types names 1 layers, not 2",
        ),
    ],
)
def test_what_is_not_supported_is_named(changes, reason):
    with pytest.raises(ModelError, match=reason):
        spec(**changes)


def test_bad_end_tokens_are_blamed_on_their_file():
    with pytest.raises(ModelError, match=r"^generation_config.json: eos_token_id must be an integer"):
        ModelSpec.from_hf_config(BASE, {"eos_token_id": "x"})


def test_end_tokens_of_the_generation_config_win():
    config = BASE | {"eos_token_id": 2}
    assert ModelSpec.from_hf_config(config).eos_token_ids == (2,)
    assert ModelSpec.from_hf_config(config, {"eos_token_id": [3, 4]}).eos_token_ids == (3, 4)
    assert ModelSpec.from_hf_config(config, {}).eos_token_ids == (2,)


def test_number_of_parameters_is_that_of_the_checkpoint():
    config = json.loads((GOLDEN / "tiny" / "qwen3" / "config.json").read_text())
    found = ModelSpec.from_hf_config(config)
    layer = 64 * 128 + 2 * 64 * 64 + 128 * 64 + 3 * 64 * 96
    assert found.num_params == 2 * layer + 256 * 64


def test_experts_are_refused_where_their_names_are_not_known():
    with pytest.raises(ModelError, match="experts are of the families mixtral, qwen3_moe, not of llama"):
        dataclasses.replace(spec(), num_experts=4, num_experts_per_token=2)


def test_a_token_meets_the_experts_that_it_takes():
    found = ModelSpec.from_hf_config(json.loads((GOLDEN / "tiny" / "qwen3_moe" / "config.json").read_text()))
    layer, expert = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 8 * 64, 3 * 64 * 32
    assert found.num_params == 2 * (layer + 8 * expert) + 2 * 256 * 64
    assert found.num_active_params == 2 * (layer + 3 * expert) + 2 * 256 * 64
    assert found.num_expert_params == 2 * 8 * expert
