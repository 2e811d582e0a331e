import importlib.util
import io
import json
import sys

import pytest

from jaxcb.sim import Simulation
from jaxcb.sim.__main__ import main
from jaxcb.sim.report import _number

SMALL = ["run", "--num-requests", "5", "--no-progress"]


def test_a_run_prints_a_table(capsys):
    assert main([*SMALL, "--workload", "uniform", "--rate", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "5 of uniform, 2 requests/s: Llama-3.1-8B on one H100\n26,925 KV pages of 16 tokens, 256 sequences"
    )
    assert "finished     5 of 5 requests in" in out
    assert all(name in out for name in ("TTFT, ms", "TPOT, ms", "ITL, ms", "latency, s", "0 preemptions"))


@pytest.mark.parametrize("shown", [True, False])
def test_a_terminal_sees_how_far_a_run_has_come(monkeypatch, shown):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(SMALL if not shown else SMALL[:-1]) == 0
    assert ("/5 [" in terminal.getvalue() and "request/s" in terminal.getvalue()) is shown


def test_json_is_one_object_with_what_was_asked_and_what_came_out(capsys):
    assert main([*SMALL, "--workload", "azure-code", "--gpu", "l4", "--model", "1b", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert answer["options"]["workload"] == "azure-code" and answer["options"]["rate"] is None
    assert answer["num_finished"] == 5 and answer["interrupted"] is False
    assert answer["ttft_s"]["p50"] <= answer["ttft_s"]["p99"] <= answer["ttft_s"]["max"]


def test_flags_of_the_engine_reach_the_scheduler(capsys):
    flags = ["--max-num-seqs", "3", "--max-num-batched-tokens", "64", "--block-size", "32", "--num-kv-pages", "500"]
    assert main([*SMALL, *flags, "--no-enable-prefix-caching", "--no-run-ahead"]) == 0
    line = "500 KV pages of 32 tokens, 3 sequences, budget 64, prefix caching off, run-ahead off"
    assert capsys.readouterr().out.splitlines()[1] == line


def test_the_timeline_follows_the_table(capsys):
    assert main([*SMALL, "--workload", "uniform", "--timeline"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.split()[-1].startswith(("P", ".P")) for line in lines if line) == 5


def test_ctrl_c_prints_what_was_done_so_far(capsys, monkeypatch):
    step, calls = Simulation.step, iter(range(20))

    def interrupted(self):
        if next(calls) == 10:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Simulation, "step", interrupted)
    assert main([*SMALL, "--workload", "uniform"]) == 130
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


def test_a_preset_sets_what_the_flags_leave_open(capsys):
    assert main([*SMALL, "--preset", "sarathi", "--max-num-seqs", "9"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("on one H100, as sarathi")
    assert lines[1].endswith("9 sequences, budget 512, prefix caching off, run-ahead on")


def test_compare_prints_a_row_a_system_and_the_best_picture(capsys, tmp_path):
    picture = tmp_path / "bars.png"
    flags = ["--presets", "orca, sarathi,distserve", "--num-requests", "12", "--rate", "6", "--no-progress"]
    assert main(["compare", *flags, "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("12 of sharegpt, 6 requests/s: Llama-3.1-8B on 2 x H100\ngoodput: TTFT within 1000 ms")
    assert [line.split()[0] for line in out.splitlines() if line.startswith(("orca", "sarathi", "distserve"))] == [
        "orca",
        "sarathi",
        "distserve",
    ] * 2
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_compare_as_json_has_every_measure(capsys):
    assert main(["compare", "--presets", "vllm-v1", "--num-requests", "6", "--json", "--no-progress"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["preset"] == "vllm-v1" and row["num_finished"] == 6 and row["good_part"] == 1.0
    assert row["ttft_s"]["p95"] > 0 and row["tpot_s"]["p99"] > 0 and row["usd_per_million_tokens"] > 0
    assert {"num_preemptions", "mean_kv_use", "kv_waste", "prefix_hit_rate", "goodput"} <= row.keys()


def test_sweep_marks_what_nothing_beats(capsys, tmp_path):
    picture = tmp_path / "front.png"
    flags = ["--num-requests", "30", "--budgets", "64,256,1024", "--seqs", "4,128", "--no-progress"]
    assert main(["sweep", *flags, "--plot", str(picture)]) == 0
    rows = [
        line.split() for line in capsys.readouterr().out.splitlines() if line[:8].strip().replace(",", "").isdigit()
    ]
    assert [(row[0], row[1]) for row in rows] == [
        ("64", "4"),
        ("256", "4"),
        ("1,024", "4"),
        ("256", "128"),
        ("1,024", "128"),
    ]
    assert any(row[-1] == "*" for row in rows) and not all(row[-1] == "*" for row in rows)
    assert picture.stat().st_size > 5_000


def test_a_run_can_be_drawn_and_opened_in_perfetto(tmp_path, capsys):
    picture, trace = tmp_path / "steps.png", tmp_path / "steps.json"
    flags = ["--workload", "uniform", "--rate", "4", "--plot", str(picture), "--trace", str(trace)]
    assert main([*SMALL, *flags]) == 0
    assert picture.stat().st_size > 5_000
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize("command", ["compare", "sweep"])
def test_ctrl_c_prints_the_rows_that_were_done(command, capsys, monkeypatch):
    step, calls = Simulation.step, iter(range(10**9))

    def interrupted(self):
        if next(calls) == 3000:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Simulation, "step", interrupted)
    assert main([command, "--num-requests", "20", "--no-progress"]) == 130
    out = capsys.readouterr().out
    assert "interrupted: " in out and ("fastertransformer" in out or "* nothing else" in out)


def test_presets_are_listed_with_their_sources(capsys):
    assert main(["presets"]) == 0
    out = capsys.readouterr().out
    assert "distserve  (a cluster: compare only)" in out and "source: Yu et al., Orca, OSDI 2022" in out
    assert main(["presets", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sarathi"]["settings"]["max_num_batched_tokens"] == 512


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("run --preset vlm", "preset must be one of fastertransformer, orca"),
        ("run --preset distserve", "need at least 2 GPUs"),
        ("compare --presets sarathi,vlm", "got 'vlm'"),
        ("compare --num-gpus 1 --presets mooncake", "need at least 2 GPUs"),
        ("compare --num-gpus 0", "num_gpus must be at least 1, got 0"),
        ("run --workload nothing.csv", "can't read the trace nothing.csv"),
        ("run --trace azure-conv", "must end in .json, got 'azure-conv'; the traffic is --workload"),
        ("sweep --plot out.pdf", "must end in .png, got 'out.pdf'"),
        ("compare --plot no/such/folder/out.png", "there is no folder no/such/folder"),
        ("run --step-log nothing.jsonl", "can't read the step log"),
        ("run --policy best", "policy must be one of"),
    ],
)
def test_whatever_is_wrong_is_said_before_anything_runs(command, message, capsys):
    assert main(command.split()) == 1
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""


@pytest.mark.parametrize("command", ["", "run", "compare", "sweep", "presets", "reference"])
def test_help_is_grouped_and_fits_a_screen(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([*command.split(), "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 75 and max(map(len, lines)) <= 100


def test_a_plot_without_matplotlib_is_refused_before_anything_is_simulated(monkeypatch, tmp_path, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    assert main(["run", "--num-requests", "3", "--plot", str(tmp_path / "a.png")]) == 1
    output = capsys.readouterr()
    assert output.err == "error: --plot needs matplotlib: pip install -e '.[bench]'\n" and not output.out


def test_large_times_stay_apart():
    assert _number(12.345) == "     12.35" and _number(99_999.0) == " 99,999.00"
    assert _number(2_125_514.86) == " 2,125,515" and _number(99_999.6) == "   100,000"
