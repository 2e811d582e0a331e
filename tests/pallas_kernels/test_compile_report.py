"""The kernels and whole steps compile for an H200 on this machine, within their bounds.

Skipped where the CUDA plug-in can't be installed (no registry). ``JAXCB_CUDA_PLUGIN`` names a folder that has it.
"""

from __future__ import annotations

from typing import Any

import pytest

from pallas_kernels.compile_report import SKIPPED, main, problems, report
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
    return {"case": "a", "kernels": {"k": {"registers": 64, "spill_bytes": 0, "tensor_core": ""} | changes}}


def step(**changes: Any) -> dict[str, Any]:
    good = {"pool_bytes": 100, "alias_bytes": 104, "pool_sized_copies": [], "top_thunks": ["kCommandBuffer"]}
    return {"case": "a"} | good | changes


@pytest.mark.parametrize(
    "found, problem",
    [
        (kernel(spill_bytes=24), "k spills 24 bytes a thread, 16 are allowed"),
        (step(alias_bytes=50), "only 50 of the pool's 100 bytes are aliased"),
        (step(pool_sized_copies=["10,10"]), "copies as large as a layer's pages: 10,10"),
        (step(top_thunks=["kGemm", "kWhile"]), "not one CUDA graph but 2 launches"),
        ({"case": "a", "error": "ValueError: no"}, "ValueError: no"),
    ],
)
def test_bounds(found, problem):
    assert problems(kernel()) == problems(step()) == []
    assert [line for line in problems(found) if line.startswith(problem)]


@pytest.mark.slow
@pytest.mark.network
def test_a_compiler_that_dies_is_reported(plugin):
    found = list(report("h200", ["no such case"], plugin))
    assert "KeyError" in problems(found[0])[0]


def test_without_a_registry_it_says_why_and_ends_as_skipped(tmp_path, monkeypatch, capsys):
    for name, value in (("INDEX_URL", "http://127.0.0.1:9/simple"), ("NO_INDEX", "1"), ("RETRIES", "0")):
        monkeypatch.setenv(f"PIP_{name}", value)
    assert main(["--target", "h200", "--plugin", str(tmp_path / "plugin")]) == SKIPPED == 77
    said = capsys.readouterr().out
    assert said.startswith("nothing is compiled: jax-cuda") and "No matching distribution found" in said
