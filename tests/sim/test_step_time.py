import dataclasses

import pytest

from jaxcb.models.spec import ModelSpec
from jaxcb.sim import GPUS, MODELS, LinearStepTime, StepLoad, StepTimeModel
from tests.sim.runs import round_model

MODEL = round_model()


@pytest.mark.parametrize(
    ("load", "expected_ms"),
    [
        (StepLoad(1, 0, 0), 4.0 + 0.5),
        (StepLoad(100, 0, 0), 4.0 + 0.5),
        (StepLoad(250, 0, 0), 10.0 + 0.5),
        (StepLoad(1, 40_000, 0), 4.0 + 1.0 + 0.5),
        (StepLoad(1, 0, 800_000), 4.0 + 1.0 + 0.5),
        (StepLoad(250, 80_000, 1_600_000), 10.0 + 2.0 + 2.0 + 0.5),
    ],
)
def test_a_step_reads_or_computes_the_weights_and_attends(load, expected_ms):
    assert MODEL.step_s(load) * 1e3 == pytest.approx(expected_ms, rel=1e-12)


def test_the_knee_is_where_computing_takes_as_long_as_reading_the_weights():
    assert MODEL.knee_tokens == pytest.approx(100)


def test_the_linear_model_is_a_constant_and_a_slope():
    assert LinearStepTime().step_s(StepLoad(1000, 10**6, 10**9)) == pytest.approx(27.2e-3, rel=1e-12)


def test_a_model_on_a_gpu_by_hand():
    model = StepTimeModel.of(MODELS["8b"], GPUS["h200"], overhead_s=1e-3)
    assert model.weight_bytes == 2 * 8_029_995_008 and model.flops_per_token == 2 * 8_029_995_008
    assert model.kv_bytes_per_token == 32 * 2 * 8 * 128 * 2
    assert model.attention_flops_per_pair == 4 * 32 * 32 * 128
    assert model.bandwidth == pytest.approx(0.85 * 4.8e12) and model.flops == pytest.approx(0.6 * 989e12)
    assert model.step_s(StepLoad(1, 0, 0)) == pytest.approx(16_059_990_016 / 4.08e12 + 1e-3)


def test_a_7b_model_at_the_h100s_peaks_takes_four_milliseconds_to_read():
    peak = dataclasses.replace(GPUS["h100"], bandwidth_fraction=1.0)
    model = StepTimeModel.of(MODELS["7b"], peak, overhead_s=0.0)
    assert model.step_s(StepLoad(1, 0, 0)) * 1e3 == pytest.approx(4.33, abs=0.01)


def test_a_step_reads_the_experts_that_its_tokens_take():
    """By hand, of four experts of which a token takes two: one token reads half, two at most three quarters."""
    model = dataclasses.replace(MODEL, weight_bytes=10e9, expert_bytes=8e9, expert_share=0.5)
    assert [model.weight_bytes_read(tokens) for tokens in (1, 2, 100)] == pytest.approx([6e9, 8e9, 10e9])
    wanted_s = 6e9 / MODEL.bandwidth + MODEL.overhead_s
    assert model.step_s(StepLoad(1, 0, 0)) == pytest.approx(wanted_s)
    assert MODEL.weight_bytes_read(1) == MODEL.weight_bytes


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "ffn", "kv_heads", "vocabulary", "positions", "experts", "taken"),
    [
        ("30b-a3b", 48, 2048, 768, 4, 151936, 40960, 128, 8),
        ("8x7b", 32, 4096, 14336, 8, 32000, 32768, 8, 2),
    ],
)
def test_a_preset_with_experts_is_the_model_that_its_config_describes(
    name, layers, hidden, ffn, kv_heads, vocabulary, positions, experts, taken
):
    spec = ModelSpec(
        family="mixtral",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_layers=layers,
        num_heads=32,
        num_kv_heads=kv_heads,
        head_dim=128,
        max_position=positions,
        num_experts=experts,
        num_experts_per_token=taken,
    )
    shape = MODELS[name]
    assert StepTimeModel.of(shape, GPUS["h200"]) == StepTimeModel.of(spec, GPUS["h200"])
    assert (shape.num_active_params, shape.max_position) == (spec.num_active_params, spec.max_position)
    assert shape.kv_bytes_per_token(2) == spec.kv_bytes_per_token(2)


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocabulary", "positions", "tied"),
    [
        ("135m", 30, 576, 1536, 9, 3, 64, 49152, 8192, True),
        ("0.6b", 28, 1024, 3072, 16, 8, 128, 151936, 40960, True),
        ("1b", 16, 2048, 8192, 32, 8, 64, 128256, 131072, True),
        ("3b", 28, 3072, 8192, 24, 8, 128, 128256, 131072, True),
        ("7b", 32, 4096, 14336, 32, 8, 128, 32768, 32768, False),
        ("8b", 32, 4096, 14336, 32, 8, 128, 128256, 131072, False),
        ("32b", 64, 5120, 25600, 64, 8, 128, 151936, 40960, False),
        ("70b", 80, 8192, 28672, 64, 8, 128, 128256, 131072, False),
    ],
)
def test_a_preset_is_the_model_that_its_config_describes(
    name, layers, hidden, ffn, heads, kv_heads, head_dim, vocabulary, positions, tied
):
    spec = ModelSpec(
        family="llama",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=positions,
        tie_word_embeddings=tied,
    )
    assert StepTimeModel.of(MODELS[name], GPUS["h200"]) == StepTimeModel.of(spec, GPUS["h200"])
    assert MODELS[name].max_position == positions
    assert MODELS[name].kv_bytes_per_token(2) == spec.kv_bytes_per_token(2)
