import json

import pytest

from jaxcb.sim import Simulation
from jaxcb.sim.__main__ import main

SMALL = ["run", "--num-requests", "5", "--no-progress"]


def test_a_run_prints_a_table(capsys):
    assert main([*SMALL, "--trace", "uniform", "--rate", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "uniform, 2 requests/s: Llama-3.1-8B on one H200\n53,685 KV pages of 16 tokens, 256 sequences"
    )
    assert "finished     5 of 5 requests in" in out
    assert all(name in out for name in ("TTFT, ms", "TPOT, ms", "ITL, ms", "latency, s", "0 preemptions"))


def test_json_is_one_object_with_what_was_asked_and_what_came_out(capsys):
    assert main([*SMALL, "--trace", "azure-code", "--gpu", "l4", "--model", "1b", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert answer["options"]["trace"] == "azure-code" and answer["options"]["rate"] is None
    assert answer["num_finished"] == 5 and answer["interrupted"] is False
    assert answer["ttft_s"]["p50"] <= answer["ttft_s"]["p99"] <= answer["ttft_s"]["max"]


def test_flags_of_the_engine_reach_the_scheduler(capsys):
    flags = ["--max-num-seqs", "3", "--max-num-batched-tokens", "64", "--block-size", "32", "--num-kv-pages", "500"]
    assert main([*SMALL, *flags, "--no-enable-prefix-caching", "--no-run-ahead"]) == 0
    line = "500 KV pages of 32 tokens, 3 sequences, budget 64, prefix caching off, run-ahead off"
    assert capsys.readouterr().out.splitlines()[1] == line


def test_the_timeline_follows_the_table(capsys):
    assert main([*SMALL, "--trace", "uniform", "--timeline"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.split()[-1].startswith(("P", ".P")) for line in lines if line) == 5


def test_ctrl_c_prints_what_was_done_so_far(capsys, monkeypatch):
    step, calls = Simulation.step, iter(range(20))

    def interrupted(self):
        if next(calls) == 10:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Simulation, "step", interrupted)
    assert main([*SMALL, "--trace", "uniform"]) == 130
    out = capsys.readouterr().out
    assert "finished     0 of 5 requests" in out and "interrupted" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "70b"], "larger than the card"),
        (["--rate", "0"], "rate must be positive"),
        (["--num-requests", "0"], "num_requests must be at least 1"),
        (["--block-size", "5"], "page_size must be 8, 16, 32, 64 or 128, got 5"),
        (["--max-num-seqs", "64", "--max-num-batched-tokens", "32"], "must be at least max_num_seqs"),
    ],
)
def test_what_cannot_work_is_one_line_and_status_1(flags, message, capsys):
    assert main(["run", *flags]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and message in captured.err and captured.err.count("\n") == 1
    assert captured.out == ""


def test_json_and_timeline_exclude_each_other(capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*SMALL, "--json", "--timeline"])
    assert "not allowed with" in capsys.readouterr().err
