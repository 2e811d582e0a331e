"""The kernel bench runs dry on a CPU, and counts bytes and FLOPs as by hand."""

from __future__ import annotations

import inspect
import itertools
import json
from typing import Any

import pytest

import pallas_kernels
from bench import kernel_cases, kernels
from bench.common import BenchError
from bench.kernel_cases import Shape, attention, batch, described
from bench.kernels import main
from bench.small_kernels import small_calls


def test_bytes_and_flops():
    shape = Shape(((1, 10), (3, 5)), 4, 2, 8)
    assert shape.kv_bytes == (10 + 5) * 2 * 8 * 2 * 2
    assert shape.flops == 2 * 2 * (10 + 3 + 4 + 5) * 4 * 8
    assert not shape.decode_only and Shape(((1, 10),), 4, 2, 8).decode_only


def test_the_timed_call_makes_no_metadata(monkeypatch):
    shape = Shape(((1, 10), (1, 3)), 4, 2, 16)
    arguments = described(shape, "xla", batch(shape, seed=0))
    monkeypatch.delattr(kernel_cases, "attention_metadata")
    assert attention(shape, "xla", interpret=False)(*arguments).shape == (2, 4, 16)


@pytest.fixture
def small(monkeypatch):
    """A bench of one shape and no other kernel, whose kernels take no time."""
    shape = Shape(((1, 10),), 4, 2, 16)
    monkeypatch.setattr(kernels, "check_shapes", lambda dry: [shape])
    monkeypatch.setattr(kernels, "timed_shapes", lambda dry: {"one": shape})
    monkeypatch.setattr(kernels, "backends_of", lambda shape, dry: ["triton", "mosaic"])
    monkeypatch.setattr(kernels, "small_calls", lambda small, seed: {})
    monkeypatch.setattr(kernels, "selection_seconds", lambda *_, **__: 1e-6)
    monkeypatch.setattr(kernels, "error", lambda *_, **__: 1e-3)
    for name in ("copy_rate", "matmul_rate"):
        monkeypatch.setattr(kernels, name, lambda *_, **__: 1e12)

    def time_shape(name: str, shape: Shape, backend: str, *_: Any) -> dict[str, Any]:
        if backend == "mosaic":
            raise RuntimeError("the compiler is not well")
        return {"us": 1.0, "gb_per_s": 1.0, "tflop_per_s": 1.0, "of_copy": 0.5, "of_matmul": 0.5}

    monkeypatch.setattr(kernels, "time_shape", time_shape)
    return monkeypatch


def test_a_backend_that_fails_is_a_row_and_stops_nothing(small, tmp_path):
    main(["--dry", "--json", str(tmp_path / "out.json"), "--markdown", str(tmp_path / "out.md")])
    result = json.loads((tmp_path / "out.json").read_text())
    good, bad = result["timed"]
    assert good["us"] == 1 and bad["error"] == "RuntimeError: the compiler is not well"
    assert result["sweep"][0][0]["us"] == 1 and len(result["selection"]) == 2
    assert "RuntimeError: the compiler is not well" in (tmp_path / "out.md").read_text()


def test_what_was_measured_before_an_end_is_in_the_files(small, tmp_path):
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    small.setattr(kernels, "select", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(["--dry", "--json", str(tmp_path / "out.json"), "--markdown", str(tmp_path / "out.md")])
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["timed"][0]["us"] == 1 and "sweep" not in result
    assert "| one " in (tmp_path / "out.md").read_text()


def test_a_wrong_kernel_is_not_timed_and_is_said_at_the_end(small, tmp_path):
    small.setattr(kernels, "error", lambda shape, backend, **_: 0.5 if backend == "triton" else float("nan"))
    with pytest.raises(BenchError, match=r"a relative error below 0\.01 was expected, got .*0\.5.*nan"):
        main(["--dry", "--json", str(tmp_path / "out.json")])
    assert json.loads((tmp_path / "out.json").read_text())["timed"] == []


def test_every_public_kernel_is_checked_and_timed():
    """By the name of its call; attention has stages of its own in the bench, and tests of its own in tests/gpu."""
    functions = {name for name in pallas_kernels.__all__ if inspect.isfunction(getattr(pallas_kernels, name))}
    attention = {"ragged_paged_attention", "decode_attention"}
    no_kernels = {"attention_metadata", "group_rows", "default_backend"}
    assert set(small_calls(small=True, seed=0)) == functions - attention - no_kernels


@pytest.mark.parametrize("budget_s, done", [(0.0, 0), (2.5, 2)])
def test_nothing_is_begun_when_the_time_is_over(small, tmp_path, budget_s, done):
    """Neither a check nor a rate, on a GPU: what is there is written all the same."""
    clock = itertools.count()
    small.setattr(kernels.time, "perf_counter", lambda: float(next(clock)))
    small.setattr(kernels, "copy_rate", lambda *_, **__: pytest.fail("measured when the time was over"))
    with pytest.raises(BenchError, match="no time was left"):
        for stage in kernels.measure(False, budget_s, 0):
            assert list(stage) == ["checks"] and len(stage["checks"]) == done


@pytest.mark.slow
def test_dry_run(tmp_path, capsys):
    main(["--dry", "--json", str(tmp_path / "out.json"), "--markdown", str(tmp_path / "out.md")])
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["dry"] and max(check["error"] for check in result["checks"]) < 1e-2
    kinds = {check["kernel"] for check in result["checks"]}
    assert kinds == {"attention", *small_calls(small=True, seed=0)}
    assert all("us" in row for row in result["small"])
    assert [row["case"] for row in result["timed"]] == ["decode 2 x 100", "prefill 1 x 64"]
    assert "| of copy |" in (tmp_path / "out.md").read_text()
    assert all("us" in rows[0] for rows in result["sweep"])
