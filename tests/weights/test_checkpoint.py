import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxcb.errors import ModelError
from jaxcb.weights import load_params, resolve
from jaxcb.weights.__main__ import main

from ..conftest import GOLDEN
from ..text.small_tokenizers import byte_level_backend, write_dir

TINY = GOLDEN / "tiny"
F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")


def loaded(path: Path, dtype=F32):
    files = resolve(str(path))
    return load_params(files, files.read_spec(), dtype)


def assert_equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(lambda a, b: assert_same_array(a, b), left, right)


def assert_same_array(a, b):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def convert(*arguments: object) -> int:
    return main(["convert", *map(str, arguments)])


@pytest.mark.parametrize("form", ["orbax", "safetensors"])
def test_converted_directory_holds_the_same_weights(tiny_model, tmp_path, form):
    assert convert(tiny_model, tmp_path / "out", "--dtype", "float32", "--format", form) == 0
    assert resolve(str(tmp_path / "out")).format == form
    assert_equal(loaded(tmp_path / "out"), loaded(tiny_model))


@pytest.mark.parametrize("form", ["orbax", "safetensors"])
def test_dtype_of_the_directory_and_of_the_engine_are_independent(tmp_path, form):
    assert convert(TINY / "qwen3", tmp_path / "out", "--dtype", "bfloat16", "--format", form) == 0
    assert resolve(str(tmp_path / "out")).read_spec().dtype == "bfloat16"
    half = loaded(TINY / "qwen3", BF16)
    assert_equal(loaded(tmp_path / "out", BF16), half)
    widened = jax.tree.map(lambda array: array.astype(F32), half)
    assert_equal(loaded(tmp_path / "out", F32), widened)


@pytest.mark.parametrize("stored, expected", [("bfloat16", "bfloat16"), ("float16", "float32"), ("float32", "float32")])
def test_auto_dtype_loses_nothing(tmp_path, stored, expected):
    model = Path(shutil.copytree(TINY / "llama", tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"dtype": stored}))
    assert convert(model, tmp_path / "out") == 0
    assert resolve(str(tmp_path / "out")).read_spec().dtype == expected


def test_safetensors_output_has_the_names_and_values_of_the_original(tmp_path):
    assert convert(TINY / "qwen2", tmp_path / "out", "--dtype", "float32", "--format", "safetensors") == 0
    ours, original = (load_file(path / "model.safetensors") for path in (tmp_path / "out", TINY / "qwen2"))
    assert ours.keys() == original.keys()
    for name, value in original.items():
        np.testing.assert_array_equal(ours[name], value.astype(np.float32), err_msg=name)


def test_tokenizer_and_configs_come_along(tmp_path):
    model = Path(shutil.copytree(TINY / "llama", tmp_path / "model"))
    write_dir(model, byte_level_backend())
    (model / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    assert convert(model, tmp_path / "out") == 0
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()
    assert resolve(str(tmp_path / "out")).read_spec().eos_token_ids == (2, 3)


def test_a_converted_directory_is_found_by_a_relative_path(tmp_path, monkeypatch):
    assert convert(TINY / "llama", tmp_path / "target") == 0
    monkeypatch.chdir(tmp_path)
    assert_equal(loaded(Path("target")), loaded(tmp_path / "target"))
    assert convert("target", "again", "--format", "safetensors") == 0


def test_target_that_is_taken_is_refused(tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    assert convert(TINY / "llama", tmp_path / "out") == 1
    assert "exists and is not an empty directory; nothing was written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "precious"]
    assert convert(TINY / "llama", tmp_path / "out" / "precious") == 1


def test_empty_target_is_filled(tmp_path):
    (tmp_path / "out").mkdir()
    assert convert(TINY / "llama", tmp_path / "out") == 0
    assert resolve(str(tmp_path / "out")).format == "orbax"


def test_bad_source_is_one_line_and_leaves_no_target(tmp_path, capsys):
    assert convert("nothing-here", tmp_path / "out") == 1
    assert capsys.readouterr().err.count("\n") == 1
    model = Path(shutil.copytree(TINY / "llama", tmp_path / "model"))
    (model / "model.safetensors").write_bytes(b"x")
    assert convert(model, tmp_path / "out") == 1
    assert not (tmp_path / "out").exists()


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    assert convert(TINY / "llama", tmp_path / "checkpoint") == 0
    return tmp_path / "checkpoint"


def edit_config(checkpoint: Path, **changes) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | changes))


def test_missing_parameter_is_named(checkpoint):
    edit_config(checkpoint, num_hidden_layers=3)
    with pytest.raises(ModelError, match=r"parameter layers\.2\..* of shape .* is missing"):
        loaded(checkpoint)


@pytest.mark.parametrize("vocab_size", [255, 300])
def test_parameter_of_another_shape_is_neither_cut_nor_padded(checkpoint, vocab_size):
    edit_config(checkpoint, vocab_size=vocab_size)
    with pytest.raises(
        ModelError, match=rf"embed\.embedding has the shape \[256, 64\], expected \[{vocab_size}, 64\] from config"
    ):
        loaded(checkpoint)


def test_damaged_checkpoint_is_a_model_error(checkpoint):
    for file in (checkpoint / "orbax").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ModelError, match="orbax"):
        loaded(checkpoint)


def test_empty_checkpoint_folder_is_a_model_error(checkpoint):
    shutil.rmtree(checkpoint / "orbax")
    (checkpoint / "orbax").mkdir()
    with pytest.raises(ModelError, match="not a readable Orbax checkpoint"):
        loaded(checkpoint)
