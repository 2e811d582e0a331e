"""Which backend an engine takes, and what it says where the native kernels can't be had."""

from __future__ import annotations

import logging
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxcb import native
from jaxcb.config import EngineConfig
from jaxcb.engine.sizing import resolve_config
from jaxcb.errors import ConfigError
from jaxcb.native.__main__ import main
from pallas_kernels.native import NativeError, build, library
from tests.engine.conftest import SPEC

pytestmark = pytest.mark.native


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As in a process that has loaded nothing, with an empty cache."""
    monkeypatch.setattr(library, "_loaded", None)
    monkeypatch.setattr(library, "_failure", None)
    monkeypatch.setenv("JAXCB_CACHE", str(tmp_path))
    monkeypatch.delenv(native.VARIABLE, raising=False)
    return tmp_path


def test_a_cpu_that_can_takes_the_native_kernels(monkeypatch):
    monkeypatch.delenv(native.VARIABLE, raising=False)
    assert native.choose(None, SPEC, jnp.float32) == "native"


def test_the_config_wins_over_the_environment(monkeypatch):
    monkeypatch.setenv(native.VARIABLE, "xla")
    assert native.choose(None, SPEC, jnp.float32) == "xla"
    assert native.choose("native", SPEC, jnp.float32) == "native"
    monkeypatch.setenv(native.VARIABLE, "cuda")
    with pytest.raises(ConfigError, match="JAXCB_BACKEND must be xla, triton, mosaic, native or unset, got 'cuda'"):
        native.choose(None, SPEC, jnp.float32)


def test_without_a_compiler_xla_runs_the_model_and_one_line_says_what_to_install(unloaded, monkeypatch, caplog):
    monkeypatch.setattr(build, "compiler", lambda: None)
    with caplog.at_level(logging.WARNING, logger="jaxcb.native"):
        assert native.choose(None, SPEC, jnp.float32) == "xla"
    (line,) = [record.getMessage() for record in caplog.records if record.name == "jaxcb.native"]
    assert "no C++ compiler: install g++ or clang++" in line
    with pytest.raises(ConfigError, match="backend native can't be used: no C\\+\\+ compiler"):
        native.choose("native", SPEC, jnp.float32)
    assert not native.usable(None)


def test_a_cpu_without_the_instructions_gets_xla(unloaded, monkeypatch):
    monkeypatch.setattr(library, "cpu_variants", lambda: [])
    with pytest.raises(NativeError, match="this CPU has neither AVX2 with FMA nor NEON"):
        library.load(unloaded)


def break_library(directory: Path, variant: str) -> None:
    file = build.library(directory / "native", variant)
    file.parent.mkdir(parents=True)
    file.write_bytes(b"this is no library")


def test_a_library_that_does_not_load_is_reported_and_not_used(unloaded):
    for variant in build.cpu_variants():
        break_library(unloaded, variant)
    assert native.choose(None, SPEC, jnp.float32) == "xla"
    assert "can't be loaded" in str(native.why_not_loaded())


def test_the_next_best_variant_takes_the_place_of_one_that_does_not_load(unloaded, monkeypatch, caplog):
    best = build.cpu_variants()[0]
    if best == "neon":
        pytest.skip("this architecture has one variant")
    broken = "avx512_bf16" if best == "avx2" else best
    monkeypatch.setattr(library, "cpu_variants", lambda: [broken, "avx2"])
    break_library(unloaded, broken)
    with caplog.at_level(logging.WARNING, logger="pallas_kernels.native"):
        assert native.choose(None, SPEC, jnp.float32) == "native"
    assert library.loaded().variant == "avx2"
    assert any(f"({broken})" in line and "the next best are tried" in line for line in caplog.messages)


def test_a_library_that_computes_wrong_numbers_is_not_used(unloaded, monkeypatch):
    def wrong(path: Path) -> None:
        raise NativeError(f"{path} computes wrong numbers")

    monkeypatch.setattr(library, "build", lambda directory, variant: Path("/does/not/matter"))
    monkeypatch.setattr(library.ctypes, "CDLL", lambda path: pytest.fail("not reached") if not path else _Symbols())
    monkeypatch.setattr(library.jax.ffi, "pycapsule", lambda function: function)
    monkeypatch.setattr(library.jax.ffi, "register_ffi_target", lambda *_, **__: None)
    monkeypatch.setattr(library, "_self_test", wrong)
    assert native.choose(None, SPEC, jnp.float32) == "xla"


class _Symbols:
    def __getattr__(self, name: str) -> str:
        return name


def test_a_compiler_that_fails_leaves_nothing(unloaded, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(NativeError, match="false failed"):
        build.build(unloaded / "native", "avx2")
    assert list((unloaded / "native").iterdir()) == []


def test_int8_weights_need_the_native_kernels():
    config = EngineConfig(quantization="int8", backend="xla", num_kv_pages=100)
    with pytest.raises(ConfigError, match="quantization int8 needs the native CPU backend, this engine has xla"):
        resolve_config(config, SPEC, jnp.float32)


def test_the_command_says_what_is_used_and_why(monkeypatch, capsys):
    monkeypatch.delenv(native.VARIABLE, raising=False)
    assert main() == 0
    assert "backend: native" in capsys.readouterr().out
    monkeypatch.setenv(native.VARIABLE, "xla")
    assert main() == 1
    assert "backend: xla, because JAXCB_BACKEND says so" in capsys.readouterr().out
