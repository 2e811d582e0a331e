import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxcb.errors import ModelError
from jaxcb.weights import resolve

from ..conftest import GOLDEN
from .small_ggufs import write_gguf

TINY = GOLDEN / "tiny" / "llama"


def test_directory_is_taken_as_it_is():
    files = resolve(str(TINY))
    assert (files.name, files.directory, files.format) == ("llama", TINY, "safetensors")


def test_directory_is_named_after_itself_however_it_is_reached(monkeypatch):
    monkeypatch.chdir(TINY)
    assert resolve(".").name == "llama"


def test_gguf_file_is_converted_once(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXCB_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "small.gguf"
    write_gguf(TINY, file, architecture="llama")
    files = resolve(str(file))
    assert (files.name, files.format) == ("small", "safetensors")
    before = (files.directory / "model.safetensors").stat().st_mtime_ns
    assert resolve(str(file)) == files
    assert (files.directory / "model.safetensors").stat().st_mtime_ns == before


def test_changed_gguf_file_is_converted_again(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXCB_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "small.gguf"
    write_gguf(TINY, file, architecture="llama")
    first = resolve(str(file))
    write_gguf(GOLDEN / "tiny" / "llama_bias", file, architecture="llama")
    second = resolve(str(file))
    assert first.directory != second.directory
    assert second.read_spec().qkv_bias and not first.read_spec().qkv_bias


def test_damaged_gguf_file_leaves_nothing_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXCB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "bad.gguf").write_bytes(b"GGUF garbage")
    with pytest.raises(ModelError, match=r"bad\.gguf is not a readable GGUF file"):
        resolve(str(tmp_path / "bad.gguf"))
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []


@pytest.mark.parametrize(
    "model, reason",
    [
        ("nothing-here", "no model 'nothing-here': no such directory or file, and it isn't a hub id"),
        ("/no/such/dir", "no such directory or file"),
        ("missing.gguf", "no such directory or file"),
        ("org/missing.gguf", "no such directory or file"),
        ("a/b/c", "no such directory or file"),
        ("", "name is empty"),
        ("  ", "name is empty"),
    ],
)
def test_unknown_model_is_refused_with_what_was_tried(model, reason):
    with pytest.raises(ModelError, match=reason) as caught:
        resolve(model)
    assert "\n" not in str(caught.value)


def test_other_files_are_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"not a \.gguf file"):
        resolve(str(tmp_path / "model.bin"))


def test_directory_without_a_config_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve(str(tmp_path))


def test_directory_with_pickles_only_is_refused(tmp_path):
    shutil.copyfile(TINY / "config.json", tmp_path / "config.json")
    with pytest.raises(ModelError, match=r"no weights: expected \*\.safetensors"):
        resolve(str(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle, which is never loaded"):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    "content, reason",
    [
        ("", "can't be read"),
        ("[]", "must hold a JSON object"),
        ("{}", "model_type None is not supported; supported: llama"),
        ('{"model_type": "gpt2"}', "model_type 'gpt2' is not supported"),
        ('{"model_type": "llama"}', "num_hidden_layers must be int, got None"),
    ],
)
def test_config_that_describes_nothing_supported_is_named(tmp_path, content, reason):
    shutil.copyfile(TINY / "model.safetensors", tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=reason) as caught:
        resolve(str(tmp_path)).read_spec()
    assert str(tmp_path) in str(caught.value)


def test_generation_config_names_the_end_tokens(tmp_path):
    model = Path(shutil.copytree(TINY, tmp_path / "model"))
    assert resolve(str(model)).read_spec().eos_token_ids == (2,)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert resolve(str(model)).read_spec().eos_token_ids == (2, 7)


HUB_SCRIPT = """
from jaxcb.errors import ModelError
from jaxcb.weights import resolve
files = resolve("someone/small")
print(files.name, files.directory.name, files.read_spec().num_layers)
assert resolve("someone/small", "v2").directory.name == "2" * 40
for name, revision in (("someone/other", None), ("someone/small", "v9")):
    try:
        resolve(name, revision)
    except ModelError as error:
        print(error)
"""


def test_hub_ids_come_from_the_hubs_cache_when_offline(tmp_path):
    """HF_HOME and HF_HUB_OFFLINE are read when huggingface_hub is imported, hence the process of its own."""
    folder = tmp_path / "hub" / "models--someone--small"
    for revision, commit in (("main", "1" * 40), ("v2", "2" * 40)):
        shutil.copytree(TINY, folder / "snapshots" / commit)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / revision).write_text(commit)
    environment = {"PATH": "/usr/bin:/bin", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", HUB_SCRIPT], env=environment, cwd=root, capture_output=True, text=True, check=True
    )
    first, *errors = result.stdout.splitlines()
    assert first == f"someone/small {'1' * 40} 2"
    assert len(errors) == 2
    assert errors[0].startswith(
        "there is no directory 'someone/other' here, and the hub gave no model 'someone/other': "
    )
    assert "at revision 'v9'" in errors[1]


def test_the_built_in_model_has_no_revisions():
    with pytest.raises(ModelError, match="the built-in model has no revision 'x'"):
        resolve(None, "x")
