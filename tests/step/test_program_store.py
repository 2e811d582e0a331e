import dataclasses
import functools
import logging
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxcb.step import program_store
from jaxcb.step.jobs import Job, compile_all
from jaxcb.step.program_store import CONTENTS, KEEP_S, ProgramStore
from jaxcb.step.shape import RunnerShape

SHAPE = RunnerShape(num_pages=4, page_size=16, num_slots=2, max_model_len=64)


@pytest.fixture
def lowered() -> list[str]:
    """Names of the jobs that were traced."""
    return []


@pytest.fixture
def compiled(monkeypatch) -> list[object]:
    """What was compiled."""
    calls, compile_one = [], jax.stages.Lowered.compile
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda self: calls.append(self) or compile_one(self))
    return calls


def job(name: str, factor: float, lowered: list[str], kept: dict) -> Job:
    """A program that multiplies its first argument, which it is given, into the second."""

    def lower():
        lowered.append(name)
        program = jax.jit(lambda x, y: {"product": x * y * factor, "sum": x + y}, donate_argnums=0)
        row = jax.ShapeDtypeStruct((5,), jnp.float32)
        return program.lower(row, row)

    return Job(name, lower, lambda program: kept.__setitem__(name, program))


def run(program) -> np.ndarray:
    return np.asarray(program(jnp.arange(5.0), jnp.full(5, 2.0))["product"])


def test_a_kept_program_is_loaded_untraced_and_computes_the_same(tmp_path, lowered):
    first, second = {}, {}
    compile_all([job("a b", 3, lowered, first)], ProgramStore(tmp_path, "key"), progress=False)
    compile_all([job("a b", 3, lowered, second)], ProgramStore(tmp_path, "key"), progress=False)
    assert lowered == ["a b"]
    np.testing.assert_array_equal(run(first["a b"]), run(second["a b"]))
    donated = jnp.arange(5.0)
    second["a b"](donated, jnp.ones(5))
    assert donated.is_deleted()


def test_a_loaded_program_refuses_other_shapes(tmp_path, lowered):
    kept = {}
    for _ in range(2):
        compile_all([job("a", 3, lowered, kept)], ProgramStore(tmp_path, "key"), progress=False)
    with pytest.raises(TypeError, match=r"compiled with float32\[5\] and called with float32\[6\]"):
        kept["a"](jnp.ones(6), jnp.ones(6))


def test_other_parts_are_traced_anew_and_compiled_only_where_the_program_is_another(tmp_path, lowered, compiled):
    for parts, name, factor in (("one", "a", 2), ("two", "a", 2), ("two", "b", 4), ("three", "a", 4)):
        kept = {}
        compile_all([job(name, factor, lowered, kept)], ProgramStore(tmp_path, parts), progress=False)
        np.testing.assert_array_equal(run(kept[name]), np.arange(5) * 2 * factor)
    assert lowered == ["a", "a", "b", "a"]
    assert len(compiled) == 2


def test_other_compiler_options_share_nothing(tmp_path, lowered, compiled):
    for options in (None, {"xla_cpu_enable_fast_math": True}, None):
        compile_all([job("a", 2, lowered, {})], ProgramStore(tmp_path, options=options), progress=False)
    assert len(compiled) == 2


def test_equal_programs_of_other_trees_are_kept_apart(tmp_path):
    row = jax.ShapeDtypeStruct((5,), jnp.float32)
    for names in (("product", "sum"), ("p", "s")):
        program = jax.jit(lambda x, y, names=names: dict(zip(names, (x * y, x + y), strict=True)))
        loaded = ProgramStore(tmp_path, names).get("a", lambda program=program: program.lower(row, row))
        assert set(loaded(jnp.ones(5), jnp.ones(5))) == set(names)


def test_a_program_out_of_jaxs_own_cache_is_not_kept(tmp_path, lowered):
    """XLA serialises only a part of what it has loaded itself: the copy could not run."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()
    try:
        for parts in ("one", "two", "two"):
            store = ProgramStore(tmp_path / f"ours-{parts}", parts)
            np.testing.assert_array_equal(run(store.get("a", job("a", 3, lowered, {}).lower)), np.arange(5) * 6)
        assert lowered == ["a"] * 3
        assert list((tmp_path / "ours-one").rglob("*.program")) and not list((tmp_path / "ours-two").rglob("*.program"))
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
        compilation_cache.reset_cache()


DAMAGES = {
    "empty": lambda content: b"",
    "text": lambda content: b"not a program",
    "cut short": lambda content: content[:-100],
    "a bit in the middle": lambda content: content[: len(content) // 2] + b"\x55" + content[len(content) // 2 + 1 :],
    "a bit of the code": lambda content: content[:-2000] + bytes([content[-2000] ^ 64]) + content[-1999:],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_a_damaged_file_is_compiled_anew_with_a_warning(tmp_path, lowered, caplog, damage):
    kept = {}
    compile_all([job("a", 2, lowered, kept)], ProgramStore(tmp_path, "key"), progress=False)
    (file,) = tmp_path.rglob("*.program")
    file.write_bytes(damage(file.read_bytes()))
    compile_all([job("a", 2, lowered, kept)], ProgramStore(tmp_path, "key"), progress=False)
    assert lowered == ["a", "a"] and "can't be loaded" in caplog.text
    np.testing.assert_array_equal(run(kept["a"]), np.arange(5) * 4)
    compile_all([job("a", 2, lowered, kept)], ProgramStore(tmp_path, "key"), progress=False)
    assert lowered == ["a", "a"], "the damaged file was replaced"


def test_two_processes_that_keep_the_same_program_leave_one_file(tmp_path, lowered):
    store = ProgramStore(tmp_path, "key")
    compile_all([job("a", 2, lowered, {})], store, progress=False)
    (content,), (file,) = (tmp_path / CONTENTS).iterdir(), store._folder.iterdir()
    store._link(content, file)
    assert list(store._folder.iterdir()) == [file] and content.stat().st_nlink == 2


TWO_DEVICES = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from jaxcb.step.program_store import ProgramStore

assert len(jax.devices()) == 2
lowered = []
def lower():
    lowered.append(1)
    return jax.jit(lambda x: x * 2).lower(jax.ShapeDtypeStruct((3,), jnp.float32))
doubled = ProgramStore(Path(sys.argv[1]), "key").get("doubled", lower)
print(len(lowered), doubled(jnp.arange(3.0)).tolist())
"""


def test_a_loaded_program_runs_on_one_device_of_several(tmp_path):
    command = [sys.executable, "-c", TWO_DEVICES, str(tmp_path)]
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    runs = [
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout for _ in range(2)
    ]
    assert runs == ["1 [0.0, 2.0, 4.0]\n", "0 [0.0, 2.0, 4.0]\n"]


def test_a_folder_that_cannot_be_written_costs_a_warning_only(tmp_path, lowered, caplog):
    (tmp_path / CONTENTS).write_text("a file where the folder should be")
    kept = {}
    with caplog.at_level(logging.WARNING):
        compile_all([job("a", 2, lowered, kept)], ProgramStore(tmp_path, "key"), progress=False)
    assert "can't be kept" in caplog.text
    np.testing.assert_array_equal(run(kept["a"]), np.arange(5) * 4)


def folder_of(directory, *parts):
    return ProgramStore(directory, *parts)._folder


def test_what_was_not_opened_for_long_is_removed(tmp_path, lowered):
    for parts in ("older", "recent", "own"):  # each multiplies by its length: three programs
        ProgramStore(tmp_path, parts).get("a", job("a", len(parts), lowered, {}).lower)
    old = time.time() - KEEP_S - 60
    for path in (folder_of(tmp_path, "older"), folder_of(tmp_path, "own"), *(tmp_path / CONTENTS).iterdir()):
        os.utime(path, (0, old))
    ProgramStore(tmp_path, "own").opened()
    folders = {folder_of(tmp_path, "recent"), folder_of(tmp_path, "own"), tmp_path / CONTENTS}
    assert set(tmp_path.iterdir()) == folders
    assert len(list((tmp_path / CONTENTS).iterdir())) == 2


def test_the_key_follows_what_programs_are_made_from(tmp_path, monkeypatch):
    key = functools.partial(folder_of, tmp_path)
    before = key(SHAPE)
    assert key(SHAPE) == before
    assert key(dataclasses.replace(SHAPE, page_size=32)) != before
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    assert key(SHAPE) != before
    monkeypatch.undo()
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        assert key(SHAPE) != before
    finally:
        jax.config.update("jax_default_matmul_precision", None)
    monkeypatch.setattr(program_store, "source_digest", lambda: "another source")
    assert key(SHAPE) != before


def test_a_changed_source_file_changes_the_fingerprint(tmp_path, monkeypatch):
    package = tmp_path / "package"
    package.mkdir()
    (package / "kernel.py").write_text("one = 1\n")
    monkeypatch.setattr(program_store.jaxcb, "__path__", [str(package)])
    program_store.source_digest.cache_clear()
    try:
        before = folder_of(tmp_path)
        program_store.source_digest.cache_clear()
        (package / "kernel.py").write_text("one = 2\n")
        assert folder_of(tmp_path) != before
    finally:
        program_store.source_digest.cache_clear()
