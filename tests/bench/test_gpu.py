from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from bench import gpu_model
from bench.common import BenchError, machine
from bench.device_lanes import idle
from bench.gpu import BUDGET_S, MODELS, Part, count_tests, measure, parts_of
from bench.gpu_report import report, targets
from bench.models import config_of, save_weights, spec_of
from jaxcb.models.decoder import init_params
from jaxcb.models.families import parameters
from jaxcb.models.params import lookup
from jaxcb.weights.loader import load_params
from jaxcb.weights.resolve import ModelFiles, resolve

ROOT = Path(__file__).parents[2]
WRITE = "import json, sys; open(sys.argv[1], 'w').write(json.dumps({'made': 1}))"


def part(name: str, code: str, **fields: object) -> Part:
    return Part(name=name, seconds=1, command=(sys.executable, "-S", "-c", code, "{out}"), **fields)


def test_a_part_that_is_slow_or_crashes_takes_nothing_from_the_others(tmp_path):
    written = []
    result = {"parts": {}}
    measure(
        [
            part("slow", f"{WRITE}; import time; time.sleep(60)"),
            part("crash", "raise SystemExit('no such kernel')"),
            part("absent", WRITE, why_not="not installed: torch"),
            part("good", WRITE),
        ],
        result,
        budget_s=4,
        folder=tmp_path,
        environment=os.environ,
        write=lambda result: written.append(json.loads(json.dumps(result))),
    )
    rows = result["parts"]
    outcomes = {name: row["outcome"] for name, row in rows.items()}
    assert outcomes == {"slow": "stopped", "crash": "failed", "absent": "left out", "good": "done"}
    assert rows["slow"]["result"] == rows["good"]["result"] == {"made": 1}, "what it had is kept"
    assert 0.8 < rows["slow"]["took_s"] < 30, "it would sleep for 60 s"
    assert "no such kernel" in rows["crash"]["note"] and rows["absent"]["note"] == "not installed: torch"
    assert rows["good"]["limit_s"] > rows["crash"]["limit_s"], "what others left over is his"
    assert [len(each["parts"]) for each in written] == [1, 2, 3, 4]


@pytest.mark.parametrize("dry", [True, False])
def test_the_parts_fill_the_budget_and_say_what_is_missing(dry, tmp_path):
    parts = parts_of(dry=dry, seed=0, folder=tmp_path, torch_python="/bin/false")
    assert sum(each.seconds for each in parts) == BUDGET_S < 480
    assert {each.name for each in parts if each.why_not} >= {f"transformers {name}" for name in MODELS}
    assert all(("--dry" in each.command) == dry for each in parts if each.name in ("kernels", *MODELS))


def test_outcomes_of_tests_are_counted_alone_and_with_workers():
    printed = """
tests/gpu/test_kernels.py::test_attention[heads0 - 64] PASSED [ 10%]
tests/gpu/test_kernels.py::test_mosaic[64-16] SKIPPED (mosaic is for Hopper) [ 20%]
[gw1] [ 30%] FAILED tests/gpu/test_kernels.py::test_fused
[gw0] [ 40%] PASSED tests/gpu/test_kernels.py::test_copy_pages
FAILED tests/gpu/test_kernels.py::test_fused - AssertionError
"""
    counts = count_tests(printed)
    assert counts == {"passed": 2, "skipped": 1, "failed": 1, "failures": ["tests/gpu/test_kernels.py::test_fused"]}


def lane(process: str, thread: str, pid: int, tid: int) -> list[dict[str, object]]:
    return [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}},
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": thread}},
    ]


def span(pid: int, tid: int, ts: float, dur: float, name: str = "fusion") -> dict[str, object]:
    return {"ph": "X", "pid": pid, "tid": tid, "ts": ts, "dur": dur, "name": name}


def test_idle_time_is_what_no_stream_works_in():
    events = [
        *lane("/device:GPU:0 (H200)", "Stream #13(Compute)", 1, 13),
        *lane("/device:GPU:0 (H200)", "Stream #14(Compute,MemcpyD2H)", 1, 14),
        *lane("/device:GPU:0 (H200)", "XLA Modules", 1, 99),
        *lane("/host:CPU", "python", 7, 13),
        span(1, 13, 100, 10),
        span(1, 14, 105, 10),  # overlaps
        span(1, 13, 120, 20),
        span(1, 14, 116, 3, "MemcpyD2H"),
        span(1, 13, 170, 30),
        span(1, 99, 0, 1000),
        span(7, 13, 0, 1000),
    ]
    found = idle(events)
    assert (found.wall_us, found.busy_us, found.num_kernels, found.longest_gap_us) == (100, 65, 4, 30)
    assert found.share == pytest.approx(0.35)
    with pytest.raises(BenchError, match="no kernel of a GPU"):
        idle([*lane("/host:CPU", "python", 7, 13), span(7, 13, 0, 1000)])


def test_targets_are_judged_by_what_was_measured_and_nothing_else():
    model = {
        "buckets": [{"bucket": "decode 1", "of_bound": 0.86}, {"bucket": "decode 256", "of_bound": 0.79}],
        "long_prompts": {"of_matmul": 0.6},
        "chats": {"output_tok_s": 900.0},
        "idle": {"share": 0.02},
    }
    verdicts = {each.what: each.verdict for each in targets(model, {"continuous batching": {"output_tok_s": 250.0}})}
    assert list(verdicts.values()) == ["yes", "not measured", "not measured", "no", "yes", "yes", "no"]
    assert {each.verdict for each in targets({}, {})} == {"not measured"}


def test_weights_are_written_as_checkpoints_have_them(tmp_path):
    name = "llama-3.1-8b"
    spec = spec_of(name, small=True)
    params = init_params(spec, jnp.bfloat16, seed=1)
    save_weights(spec, params, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_of(name, small=True)))
    files = ModelFiles(directory=tmp_path, name=name, format="safetensors")
    assert files.read_spec() == spec
    read = load_params(files, spec, jnp.dtype("bfloat16"))
    for parameter in parameters(spec):
        ours, theirs = (np.asarray(lookup(each, parameter.path)) for each in (params, read))
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.xdist_group("bench")
def test_a_model_is_measured_dry_and_reported(tmp_path, tiny, monkeypatch):
    # The shapes of the other tests, so that the program store has each program.
    monkeypatch.setattr(gpu_model, "spec_of", lambda name, small: resolve(tiny).read_spec())
    monkeypatch.setattr(gpu_model, "init_params", lambda spec, dtype, seed: init_params(spec, jnp.float32, seed))
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 128}
    monkeypatch.setattr(gpu_model, "DRY", sizes)
    flags = ["--model", "qwen3-0.6b", "--dry", "--json", str(tmp_path / "m.json"), "--hand-over", str(tmp_path / "w")]
    result = gpu_model.main(flags)
    assert json.loads((tmp_path / "m.json").read_text()) == json.loads(json.dumps(result))
    assert list(result["left_out"]) == ["idle"] and "no kernel of a GPU" in result["left_out"]["idle"]
    assert [row["bucket"] for row in result["buckets"]] == ["decode 1", "decode 2", "mixed 16"]
    for row in result["buckets"]:
        assert row["of_bound"] == pytest.approx(row["bound_ms"] / row["step_ms"]["median"])
        by_bytes, by_flops = (
            1e3 * row[work] / result["ceilings"][rate]
            for work, rate in (("num_bytes", "bytes_per_s"), ("num_flops", "flops_per_s"))
        )
        assert row["bound_ms"] == pytest.approx(max(by_bytes, by_flops))
    assert len(json.loads((tmp_path / "w/requests.json").read_text())) == 8
    done = {"outcome": "done", "took_s": 1.0, "limit_s": 2.0}
    whole = {
        "device": result["device"],
        "machine": machine(),
        "dry": False,
        "models": ["qwen3-0.6b"],
        "parts": {"qwen3-0.6b": done | {"result": result}},
    }
    text = report(whole)
    assert "| decode 2 |" in text and "Left out: idle" in text and "| device idle " in text
    assert "dry run" not in text and "dry run" in report(whole | {"dry": True})


def test_the_command_runs_and_writes_both_files(tmp_path):
    flags = ["--dry", "--parts", "transformers llama", "--torch-python", "/bin/false", "--out", str(tmp_path / "out")]
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run([ROOT / "bench/gpu.sh", *flags], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    part = json.loads((tmp_path / "out/gpu.json").read_text())["parts"]["transformers llama-3.1-8b"]
    assert part["outcome"] == "left out" and "/bin/false" in part["note"]
    assert "| transformers llama-3.1-8b | left out |" in (tmp_path / "out/gpu.md").read_text()
