import json
import random
import struct
from pathlib import Path

import gguf as gguf_package
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxcb.errors import ModelError
from jaxcb.models.spec import ModelSpec
from jaxcb.text import Tokenizer
from jaxcb.weights import gguf
from jaxcb.weights.gguf_file import GGUFFile

from ..conftest import GOLDEN
from .small_ggufs import write_gguf

TINY = GOLDEN / "tiny"
CASES = {
    "llama": "llama",
    "llama_bias": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}


def converted(source: Path, tmp_path: Path, **options) -> tuple[Path, dict[str, np.ndarray]]:
    stored = write_gguf(source, tmp_path / "model.gguf", **options)
    target = tmp_path / "hf"
    target.mkdir()
    gguf.convert(tmp_path / "model.gguf", target)
    return target, stored


def spec_of(folder: Path) -> ModelSpec:
    return ModelSpec.from_hf_config(json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize("name", sorted(CASES))
def test_weights_come_back_as_they_were(tmp_path, name):
    target, stored = converted(TINY / name, tmp_path, architecture=CASES[name])
    weights = load_file(target / "model.safetensors")
    assert weights.keys() == stored.keys()
    for key, value in stored.items():
        np.testing.assert_array_equal(weights[key], value, err_msg=key)


@pytest.mark.parametrize("name", sorted(CASES))
def test_config_describes_the_same_model(tmp_path, name):
    target, _ = converted(TINY / name, tmp_path, architecture=CASES[name])
    ours, original = spec_of(target), spec_of(TINY / name)
    for field in (
        "hidden_size",
        "num_kv_heads",
        "head_dim",
        "qkv_bias",
        "o_bias",
        "mlp_bias",
        "qk_norm",
        "intermediate_size",
        "num_experts",
        "num_experts_per_token",
        "norm_expert_weights",
        "rms_norm_eps",
    ):
        assert getattr(ours, field) == getattr(original, field), field
    assert ours.tie_word_embeddings == original.tie_word_embeddings
    assert ours.rope.theta == original.rope.theta
    assert (ours.eos_token_ids, ours.bos_token_id) == ((1,), 0)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_1", "F16", "BF16"])
def test_quantised_weights_are_dequantised(tmp_path, kind):
    quantize = gguf_package.GGMLQuantizationType[kind]
    target, stored = converted(TINY / "llama", tmp_path, architecture="llama", quantize=quantize)
    weights = load_file(target / "model.safetensors")
    for key, value in stored.items():
        np.testing.assert_array_equal(weights[key].astype(np.float32), value, err_msg=key)
    expected = {"F16": "float16", "BF16": "bfloat16"}.get(kind, "float32")
    assert weights["model.layers.0.self_attn.q_proj.weight"].dtype.name == expected
    assert weights["model.norm.weight"].dtype == np.float32


def test_sliding_window_makes_it_a_mistral(tmp_path):
    target, _ = converted(TINY / "mistral", tmp_path, architecture="llama", edit=lambda w: w.add_sliding_window(8))
    assert spec_of(target).windows == (8, 8)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_is_kept(tmp_path, kind):
    def edit(writer):
        writer.add_rope_scaling_type(gguf_package.RopeScalingType(kind))
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)

    rope = spec_of(converted(TINY / "llama", tmp_path, architecture="llama", edit=edit)[0]).rope
    assert (rope.kind, rope.factor, rope.original_max_position) == (kind, 4.0, 64)


def llama3_factors(factor: float, head_dim: int, theta: float) -> np.ndarray:
    """Llama 3's divisors as its reference code computes them, from wavelengths."""
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    factors = []
    for frequency in frequencies:
        wavelength = 2 * np.pi / frequency
        smooth = (8192 / wavelength - 1) / (4 - 1)
        blended = 1 / ((1 - smooth) / factor + smooth)
        factors.append(1.0 if wavelength < 8192 / 4 else factor if wavelength > 8192 else blended)
    return np.array(factors, np.float32)


def test_frequency_factors_of_llama_3_are_recognised(tmp_path):
    def edit(writer):
        writer.add_tensor("rope_freqs.weight", llama3_factors(8.0, 16, 500_000.0))

    rope = spec_of(converted(TINY / "llama_bias", tmp_path, architecture="llama", edit=edit)[0]).rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("llama3", 8.0, 8192)
    assert (rope.low_freq_factor, rope.high_freq_factor) == (1.0, 4.0)


@pytest.mark.parametrize(
    "architecture, edit, reason",
    [
        ("phi3", lambda w: None, "architecture 'phi3' is not supported; supported: llama, qwen2, qwen3, qwen3moe"),
        ("qwen2", lambda w: w.add_expert_count(8), "qwen2 with 8 experts is not supported"),
        ("qwen3moe", lambda w: None, "qwen3moe with 0 experts is not supported"),
        ("llama", lambda w: w.add_expert_count(8), "llama.expert_used_count must be an integer, got None"),
        ("llama", lambda w: w.add_value_length(8), "attention.value_length must equal the head size 16, got 8"),
        ("llama", lambda w: w.add_tensor("rope_freqs.weight", np.full(8, 3.0, np.float32)), "rope_freqs.weight"),
        ("llama", lambda w: w.add_tensor("blk.0.attn_sinks.weight", np.ones(4, np.float32)), "blk.0.attn_sinks.weight"),
        ("llama", lambda w: w.add_string("llama.rope.scaling.type", "longrope"), "'longrope' is not supported"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, architecture, edit, reason):
    with pytest.raises(ModelError, match=reason):
        converted(TINY / "llama", tmp_path, architecture=architecture, edit=edit)


def test_missing_vocabulary_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.tokens"):
        converted(TINY / "llama", tmp_path, architecture="llama", vocabulary=False)


def test_tokenizer_and_template_are_written(tmp_path):
    def edit(writer):
        writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}")
        writer.add_add_bos_token(True)

    tokenizer = Tokenizer.from_dir(converted(TINY / "llama", tmp_path, architecture="llama", edit=edit)[0])
    assert tokenizer.encode("he the") == [0, 7, 8]
    assert tokenizer.decode([0, 7, 8]) == "he the"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "the"}]) == [0, 3, 7]


def test_end_of_turn_token_ends_too(tmp_path):
    target, _ = converted(TINY / "llama", tmp_path, architecture="llama", edit=lambda w: w.add_eot_token_id(5))
    assert json.loads((target / "generation_config.json").read_text())["eos_token_id"] == [1, 5]


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a gguf file at all", b"GGUF" + b"\xff" * 64, b"\0" * 4096])
def test_garbage_is_refused(tmp_path, content):
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=r"bad\.gguf is not a readable GGUF file"):
        GGUFFile(tmp_path / "bad.gguf")


def header(*, version=3, num_tensors=0, num_values=0, rest=b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_values) + rest


HUGE = 2**63
LONG_KEY = struct.pack("<Q", HUGE) + b"key"
ARRAY = struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 4, HUGE)
STRINGS = struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 8, HUGE)
NESTED = struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 9, 1)
TENSOR = struct.pack("<Q", 1) + b"t" + struct.pack("<IQQIQ", 2, 2**32, 2**32, 0, 0)
OFFSET = struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 32, 0, 2**64 - 32)
DIMS = struct.pack("<Q", 1) + b"t" + struct.pack("<I", 2**31)
ALIGNED = struct.pack("<Q", 17) + b"general.alignment" + struct.pack("<II", 4, 0)


@pytest.mark.parametrize(
    "content",
    [
        header(version=1),
        header(version=77),
        header(num_tensors=2**64 - 1),
        header(num_values=2**64 - 1),
        header(num_values=1, rest=LONG_KEY),
        header(num_values=1, rest=ARRAY),
        header(num_values=1, rest=STRINGS),
        header(num_values=1, rest=NESTED),
        header(num_values=1, rest=struct.pack("<Q", 1) + b"k" + struct.pack("<I", 99)),
        header(num_values=1, rest=ALIGNED),
        header(num_tensors=1, rest=TENSOR),
        header(num_tensors=1, rest=OFFSET),
        header(num_tensors=1, rest=DIMS),
    ],
)
def test_sizes_that_do_not_fit_the_file_are_refused(tmp_path, content):
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=r"not a readable GGUF file"):
        GGUFFile(tmp_path / "bad.gguf")


def test_truncated_file_is_refused_wherever_it_ends(tmp_path):
    write_gguf(TINY / "llama", tmp_path / "model.gguf", architecture="llama")
    content = (tmp_path / "model.gguf").read_bytes()
    for size in [*range(0, 1200, 7), len(content) // 2, len(content) - 4096]:
        (tmp_path / "cut.gguf").write_bytes(content[:size])
        with pytest.raises(ModelError, match="not a readable GGUF file"):
            GGUFFile(tmp_path / "cut.gguf")


@pytest.mark.parametrize("seed", range(4))
def test_damaged_header_never_ends_in_anything_but_a_model_error(tmp_path, seed):
    write_gguf(TINY / "llama", tmp_path / "model.gguf", architecture="llama")
    content = (tmp_path / "model.gguf").read_bytes()
    rng = random.Random(seed)
    for attempt in range(60):
        damaged = bytearray(content)
        for _ in range(rng.randint(1, 8)):
            damaged[rng.randrange(2500)] = rng.randrange(256)
        (tmp_path / "bad.gguf").write_bytes(damaged)
        target = tmp_path / f"out{attempt}"
        target.mkdir()
        try:
            gguf.convert(tmp_path / "bad.gguf", target)
        except ModelError as error:
            assert "bad.gguf" in str(error), (seed, attempt)
