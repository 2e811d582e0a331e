"""The kernels and whole steps compile for an H200 on this machine, within their bounds.

Skipped where the CUDA plug-in can't be installed (no registry). ``JAXCB_CUDA_PLUGIN`` names a folder that has it.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
from typing import Any

import pytest

from pallas_kernels.compile_report import SKIPPED, lines, main, problems, report
from pallas_kernels.deviceless import NoPluginError, install_plugin
from pallas_kernels.mosaic import has_api

pytestmark = pytest.mark.xdist_group("compile_report")


@pytest.mark.slow
@pytest.mark.network
def test_attention_kernels_of_the_usual_head_sizes(plugin):
    for found in report("h200", ["attention d64 bfloat16", "attention d128 int8"], plugin):
        assert problems(found) == []
        assert len(found["kernels"]) == 2, "tiles of chunks, splits of decodes"
        assert any(facts["tensor_core"] == "wgmma" for facts in found["kernels"].values())


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize("name", ["step decode", "step mixed", "step mixed mosaic"])
def test_a_step_aliases_the_pages_and_is_one_graph(plugin, name):
    if "mosaic" in name and not has_api():
        pytest.skip("mosaic needs jax 0.11")
    for found in report("h200", [name], plugin):
        assert problems(found) == []
        assert found["temp_bytes"] < found["pool_bytes"] / 4


def kernel(**changes: Any) -> dict[str, Any]:
    good = {"registers": 64, "spill_bytes": 0, "shared_bytes": 101_376, "tensor_core": ""}
    return {"target": "l4", "case": "a", "kernels": {"k": good | changes}}


def step(**changes: Any) -> dict[str, Any]:
    good = {"pool_bytes": 100, "alias_bytes": 104, "pool_sized_copies": [], "top_thunks": ["kCommandBuffer"]}
    return {"target": "l4", "case": "a"} | good | changes


@pytest.mark.parametrize(
    "found, problem",
    [
        (kernel(spill_bytes=24), "k spills 24 bytes a thread, 16 are allowed"),
        (kernel(shared_bytes=101_377), "k is launched with 101,377 bytes of shared memory, there are 101,376"),
        (kernel(promised_bytes=90_000), "k is launched with 101,376 bytes of shared memory, not 90,000"),
        (step(alias_bytes=50), "only 50 of the pool's 100 bytes are aliased"),
        (step(pool_sized_copies=["10,10"]), "copies as large as a layer's pages: 10,10"),
        (step(top_thunks=["kGemm", "kWhile"]), "not one CUDA graph but 2 launches"),
        ({"target": "l4", "case": "a", "error": "ValueError: no"}, "ValueError: no"),
    ],
)
def test_bounds(found, problem):
    assert problems(kernel()) == problems(step()) == []
    assert [line for line in problems(found) if line.startswith(problem)]


def test_the_table_has_registers_spills_and_shared_memory():
    assert lines(kernel(spill_bytes=8, tensor_core="mma"))[0].split() == ["a", "k", "64", "8", "101,376", "mma"]


def fake_process(monkeypatch, printed: str, outcome: type[Exception] | None) -> None:
    """A compiler that prints, and then ends or takes too long."""

    def run(command: Any, **_: Any) -> Any:
        if outcome is not None:
            raise subprocess.TimeoutExpired(command, 1800, output=printed.encode())
        return subprocess.CompletedProcess(command, -6, printed, "aborted")

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.parametrize(
    "outcome, problem",
    [
        (None, "the compiler died with -6: aborted"),
        (subprocess.TimeoutExpired, "the compiler took longer than 1800 s over this case or one before it"),
    ],
)
def test_a_process_that_ends_early_is_a_problem_of_the_cases_left(tmp_path, monkeypatch, outcome, problem):
    (tmp_path / "nvidia/cuda/bin").mkdir(parents=True)
    (tmp_path / "nvidia/cuda/bin/ptxas").touch()
    fake_process(monkeypatch, '{"case": "one", "kernels": {}}\n', outcome)
    found = list(report("h200", ["one", "two"], tmp_path))
    assert [(each["case"], problems(each)) for each in found] == [("one", []), ("two", [problem])]


@pytest.mark.slow
@pytest.mark.network
def test_a_compiler_that_dies_is_reported(plugin):
    found = list(report("h200", ["no such case"], plugin))
    assert "KeyError" in problems(found[0])[0]


def test_another_version_of_jax_is_installed_anew(tmp_path, monkeypatch):
    commands: list[list[str]] = []
    status = 0

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        return subprocess.CompletedProcess(command, status, "", "ERROR: no space left")

    monkeypatch.setattr(subprocess, "run", run)
    version = "0.11.2"
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    for _ in range(2):
        assert install_plugin(tmp_path) == tmp_path
    assert len(commands) == 1 and "jax-cuda13-plugin==0.11.2" in commands[0]
    version, status = "0.12.0.1", 1
    with pytest.raises(NoPluginError, match=r"jax-cuda13-plugin==0\.12\.0\.1.* no space left"):
        install_plugin(tmp_path)
    version, status = "0.11.2", 0  # what is there now may be half of either
    install_plugin(tmp_path)
    assert len(commands) == 3 and all("--upgrade" in command for command in commands)


def test_without_a_registry_it_says_why_and_ends_as_skipped(tmp_path, monkeypatch, capsys):
    for name, value in (("INDEX_URL", "http://127.0.0.1:9/simple"), ("NO_INDEX", "1"), ("RETRIES", "0")):
        monkeypatch.setenv(f"PIP_{name}", value)
    assert main(["--target", "h200", "--plugin", str(tmp_path / "plugin")]) == SKIPPED == 77
    said = capsys.readouterr().out
    assert said.startswith("nothing is compiled: jax-cuda") and "No matching distribution found" in said
