from __future__ import annotations

import json

import pytest

from bench import buckets
from bench.buckets import Use, padding_above, replay_in_process, replay_ratio, time_steps, use_of_buckets
from bench.full_step import full_plan
from bench.inprocess import InProcess, LaunchedRow, LaunchedStep
from bench.workload import make
from jaxcb.step.buckets import Bucket

pytestmark = pytest.mark.xdist_group("bench")  # one worker loads the model for all
DECODE_4, MIXED_8 = Bucket(4, 4, True), Bucket(8, 4, False)


def test_padding_above_is_that_of_the_smallest_step():
    assert padding_above(MIXED_8, Bucket(4, 4, False)) == 3 / 8
    assert padding_above(MIXED_8, None) == 7 / 8
    assert padding_above(DECODE_4, Bucket(3, 3, True)) == 0


def test_use_counts_steps_tokens_and_padding():
    steps = [_step(DECODE_4, 1, 1, 1), _step(MIXED_8, 1, 5), _step(DECODE_4, 1, 1, 1, 1)]
    uses = use_of_buckets([DECODE_4, MIXED_8, Bucket(16, 4, False)], steps)
    assert list(uses.values()) == [Use(2, 7, 1), Use(1, 6, 2), Use(0, 0, 0)]
    assert [use.padding for use in uses.values()] == [1 / 8, 1 / 4, 0]


@pytest.mark.parametrize("run_ahead", [True, False])
def test_every_timed_step_is_counted_once(process, run_ahead):
    plan = full_plan(Bucket(2, 2, True), process.runner.shape, context=20)
    seconds = time_steps(process.runner, plan, 5, run_ahead=run_ahead)
    assert len(seconds) == 5
    assert all(step_s > 0 for step_s in seconds)


def test_the_replay_computes_every_token_once(process):
    workload = make(process.tokenizer, 3, 9, max_total_tokens=60)
    steps = replay_in_process(process, workload, progress=False)
    # the last token of an answer is sampled and never computed on
    expected = workload.num_prompt_tokens + workload.num_output_tokens - len(workload.items)
    assert sum(step.num_tokens for step in steps) == expected
    assert {step.bucket for step in steps} == set(process.runner.buckets)


def test_the_command_prints_every_bucket(process, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(InProcess, "load", lambda config: process)
    flags = ["--steps", "2", "--context", "24", "--num-requests", "4", "--json", str(tmp_path / "b.json")]
    result = buckets.main([*flags, "--plot", str(tmp_path / "b.png")])
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "b.json").read_text()) == result
    assert [row["bucket"] for row in result["buckets"]] == ["decode 1", "decode 2", "mixed 16"]
    for row in result["buckets"]:
        assert row["tok_s"] == pytest.approx(row["num_tokens"] / row["step_ms"]["median"] * 1e3)
    assert [row["padding_above"] for row in result["buckets"]] == [0, 0, 0.9375]
    assert 0 < result["workload_padding"] < 1
    printed = capsys.readouterr().out
    assert "device cpu" in printed and "dtype float32" in printed and "| mixed 16 |" in printed


def test_the_same_steps_are_replayed_without_the_scheduler(process):
    workload = make(process.tokenizer, 3, 4, max_total_tokens=40)
    num_steps = len(replay_in_process(process, workload, progress=False))
    result = replay_ratio(process, workload, 2, progress=False)
    assert (result["steps"], result["rounds"]) == (num_steps, 2)
    assert result["replayed_s"] > 0 and result["ratio"] > 0


def _step(bucket: Bucket, *num_tokens: int) -> LaunchedStep:
    return LaunchedStep(bucket, tuple(LaunchedRow("x", count, count == 1) for count in num_tokens))
