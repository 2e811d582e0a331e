import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from safetensors.numpy import load_file, save_file

from jaxcb.config import EngineConfig
from jaxcb.errors import ModelError
from jaxcb.models.decoder import param_shapes
from jaxcb.weights import default_dtype, load, load_params, resolve
from jaxcb.weights.held import held_params

from ..conftest import GOLDEN
from ..text.small_tokenizers import byte_level_backend, write_dir

F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")


@pytest.fixture
def model(tmp_path) -> Path:
    """A copy of a small checkpoint, to be damaged."""
    return Path(shutil.copytree(GOLDEN / "tiny" / "llama", tmp_path / "model"))


def loaded(path: Path, dtype=F32):
    files = resolve(str(path))
    return load_params(files, files.read_spec(), dtype)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_pytree_is_the_one_the_decoder_takes(tiny_model, dtype):
    params = loaded(tiny_model, dtype)
    expected = param_shapes(resolve(str(tiny_model)).read_spec(), dtype)
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    jax.tree.map(lambda array, shape: assert_like(array, shape), params, expected)


def assert_like(array, shape):
    assert (array.shape, array.dtype) == (shape.shape, shape.dtype)


def test_every_weight_of_the_file_is_found_again_in_the_pytree(tiny_model):
    weights = {name: value.astype(np.float32) for name, value in load_file(tiny_model / "model.safetensors").items()}
    params, spec = loaded(tiny_model), resolve(str(tiny_model)).read_spec()
    q, kv, ffn = spec.q_size, spec.kv_size, spec.intermediate_size
    parts = {
        "self_attn.q_proj": ("qkv", slice(0, q)),
        "self_attn.k_proj": ("qkv", slice(q, q + kv)),
        "self_attn.v_proj": ("qkv", slice(q + kv, q + 2 * kv)),
        "self_attn.o_proj": ("o", slice(None)),
        "mlp.gate_proj": ("gate_up", slice(0, ffn)),
        "mlp.up_proj": ("gate_up", slice(ffn, 2 * ffn)),
        "mlp.down_proj": ("down", slice(None)),
        "mlp.gate": ("router", slice(None)),
        "block_sparse_moe.gate": ("router", slice(None)),
    }
    for expert in range(spec.num_experts):
        names = ("block_sparse_moe", "w1", "w3", "w2")
        if spec.family == "qwen3_moe":
            names = ("mlp", "gate_proj", "up_proj", "down_proj")
        gate, up, down = (f"{names[0]}.experts.{expert}.{part}" for part in names[1:])
        parts |= {gate: ("gate_up", (expert, slice(0, ffn))), up: ("gate_up", (expert, slice(ffn, 2 * ffn)))}
        parts[down] = ("down", expert)
    norms = {
        "input_layernorm": "input_norm",
        "post_attention_layernorm": "post_norm",
        "self_attn.q_norm": "q_norm",
        "self_attn.k_norm": "k_norm",
    }
    for name, value in weights.items():
        if not name.startswith("model.layers."):
            path = {
                "model.embed_tokens.weight": ("embed", "embedding"),
                "model.norm.weight": ("final_norm", "scale"),
                "lm_head.weight": ("lm_head", "kernel"),
            }[name]
            ours = params[path[0]][path[1]]
        else:
            _, _, index, rest = name.split(".", 3)
            part, kind = rest.rsplit(".", 1)
            layer = params["layers"][int(index)]
            if part in norms:
                ours = layer[norms[part]]["scale"]
            else:
                where, rows = parts[part]
                ours = layer[where][kind.replace("weight", "kernel")][rows]
        np.testing.assert_array_equal(ours, value, err_msg=name)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_may_lie_in_one_tensor_of_a_layer(name, tmp_path):
    """As transformers 5 has them in memory, under names of its own."""
    wanted, weights = loaded(GOLDEN / "tiny" / name), load_file(GOLDEN / "tiny" / name / "model.safetensors")
    weights = {key: value for key, value in weights.items() if ".experts." not in key}
    weights = {key.replace("block_sparse_moe", "mlp"): value for key, value in weights.items()}
    for index, layer in wanted["layers"].items():
        for part in ("gate_up", "down"):
            stored = np.asarray(layer[part]["kernel"]).astype(ml_dtypes.bfloat16)
            weights[f"model.layers.{index}.mlp.experts.{part}_proj"] = stored
    shutil.copytree(GOLDEN / "tiny" / name, tmp_path / "model")
    save_file(weights, tmp_path / "model" / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, loaded(tmp_path / "model"), wanted)


@pytest.mark.parametrize("together", [False, True])
def test_a_callers_experts_are_found_by_their_names(together):
    """One by one, as in files, and those of a layer in one array."""
    folder = GOLDEN / "tiny" / "mixtral"
    spec, wanted, flat = resolve(str(folder)).read_spec(), loaded(folder), load_file(folder / "model.safetensors")
    if together:
        flat = {name.replace("block_sparse_moe", "mlp"): x for name, x in flat.items() if ".experts." not in name}
        for index, layer in wanted["layers"].items():
            for part in ("gate_up", "down"):
                flat[f"model.layers.{index}.mlp.experts.{part}_proj"] = layer[part]["kernel"]
    held = held_params(spec, unflatten_dict({tuple(name.split(".")): jnp.asarray(x, F32) for name, x in flat.items()}))
    jax.tree.map(np.testing.assert_array_equal, held, wanted)
    with pytest.raises(ModelError, match=r"the params have no model\.layers\.1\.(mlp|block_sparse_moe)\."):
        without = {name: x for name, x in flat.items() if "layers.1." not in name or "experts" not in name}
        held_params(spec, unflatten_dict({tuple(name.split(".")): jnp.asarray(x, F32) for name, x in without.items()}))


def test_routers_stay_float32():
    layer = loaded(GOLDEN / "tiny" / "mixtral", BF16)["layers"][0]
    assert (layer["router"]["kernel"].dtype, layer["down"]["kernel"].dtype) == (F32, BF16)


def test_norm_scales_stay_float32(model):
    params = loaded(model, BF16)
    assert params["final_norm"]["scale"].dtype == F32
    assert params["layers"][0]["input_norm"]["scale"].dtype == F32
    assert params["layers"][0]["qkv"]["kernel"].dtype == BF16


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_every_stored_dtype_becomes_the_engines(model, stored, dtype):
    """EasyDeL#86: the same weights gave another text than the reference."""
    weights = {name: value.astype(stored) for name, value in load_file(model / "model.safetensors").items()}
    save_file(weights, model / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    kernel = loaded(model, dtype)["layers"][1]["down"]["kernel"]
    assert kernel.dtype == dtype
    np.testing.assert_array_equal(kernel, weights[name].astype(np.float32).astype(dtype))


def shard(model: Path, num_shards: int) -> None:
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    files = {
        name: f"model-{i % num_shards:05}-of-{num_shards:05}.safetensors" for i, name in enumerate(sorted(weights))
    }
    for file in set(files.values()):
        save_file({name: weights[name] for name in weights if files[name] == file}, model / file)
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def assert_equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(np.testing.assert_array_equal, left, right)


def test_shards_load_like_one_file(model):
    expected = loaded(model)
    shard(model, 3)
    assert_equal(loaded(model), expected)


def test_missing_shard_is_named(model):
    shard(model, 3)
    (model / "model-00001-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00001-of-00003\.safetensors is not a readable safetensors file"):
        loaded(model)


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/passwd", "sub/model.safetensors", 7])
def test_index_may_not_point_to_another_folder(model, name):
    shard(model, 2)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(ModelError, match="not a file beside it"):
        loaded(model)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 3}'])
def test_damaged_index_is_named(model, content):
    shard(model, 2)
    (model / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=r"index\.json can't be read"):
        loaded(model)


def edit(model: Path, change) -> None:
    weights = load_file(model / "model.safetensors")
    change(weights)
    save_file(weights, model / "model.safetensors")


def test_missing_tensor_is_named_with_its_shape(model):
    edit(model, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight of shape \[96, 64\] is missing"):
        loaded(model)


def test_wrong_shape_is_named_with_what_was_expected(model):
    edit(model, lambda weights: weights.update({"model.norm.weight": np.ones(63, np.float32)}))
    with pytest.raises(
        ModelError, match=r"model\.norm\.weight has the shape \[63\], expected \[64\] from config\.json"
    ):
        loaded(model)


def test_transposed_square_aside_a_swapped_shape_is_refused(model):
    def swap(weights):
        weights["model.layers.0.mlp.down_proj.weight"] = weights["model.layers.0.mlp.down_proj.weight"].T.copy()

    edit(model, swap)
    with pytest.raises(ModelError, match=r"\[96, 64\], expected \[64, 96\]"):
        loaded(model)


def test_integer_weights_are_refused(model):
    edit(model, lambda weights: weights.update({"model.norm.weight": np.ones(64, np.int8)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is stored as I8; supported: F32, F16, BF16"):
        loaded(model)


def test_tensors_that_are_not_needed_are_ignored(model, caplog):
    expected = loaded(model)
    edit(
        model, lambda weights: weights.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)})
    )
    with caplog.at_level("DEBUG", logger="jaxcb.weights.loader"):
        assert_equal(loaded(model), expected)
    assert "1 tensors are not used: model.layers.0.self_attn.rotary_emb.inv_freq" in caplog.text


def test_truncated_weights_are_refused(model):
    content = (model / "model.safetensors").read_bytes()
    for size in (0, 4, 8, 100, 2000, len(content) // 2, len(content) - 1):
        (model / "model.safetensors").write_bytes(content[:size])
        with pytest.raises(ModelError, match=r"model\.safetensors is not a readable safetensors file"):
            loaded(model)


@pytest.mark.parametrize(
    "header",
    [
        b"\xff" * 8,
        (2**62).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (60).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,9999999]}}',
        (82).to_bytes(8, "little")
        + b'{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}        ',
    ],
)
def test_headers_with_false_sizes_are_refused(model, header):
    (model / "model.safetensors").write_bytes(header)
    with pytest.raises(ModelError, match=r"model\.safetensors is not a readable safetensors file"):
        loaded(model)


def test_load_gives_everything_of_a_directory(model):
    write_dir(model, byte_level_backend())
    result = load(EngineConfig(model=str(model), dtype="bfloat16"))
    assert result.name == "model"
    assert result.spec.num_layers == 2
    assert result.params["embed"]["embedding"].dtype == BF16
    assert result.tokenizer.has_chat_template


def test_load_of_the_built_in_model(builtin_model, golden):
    result = load(EngineConfig(dtype="bfloat16"))
    assert result.name == golden["model"]
    assert result.spec.eos_token_ids == (2,)
    assert result.spec.tie_word_embeddings and "lm_head" not in result.params
    assert result.params["layers"]["qkv"]["kernel"].size == 30 * 960 * 576
    assert result.tokenizer.vocab_size == result.spec.vocab_size == 49152


def test_auto_dtype_is_bfloat16_where_the_hardware_multiplies_it():
    assert default_dtype("gpu", native=False) == "bfloat16"
    assert default_dtype("cpu", native=True) == "bfloat16"
    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    assert default_dtype("cpu", native=False) == ("bfloat16" if "avx512_bf16" in flags else "float32")
