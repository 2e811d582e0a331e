from __future__ import annotations

import argparse
import json
import math
import threading
import time

import numpy as np
import pytest

from bench.client import Answer, Replay, replay
from bench.serving import _limit, _rate, arrivals, latencies_ms, main, met, summarize
from bench.workload import Item, Workload, to_json
from tests.bench.fake_server import MODEL, fake_server, right_answer

ANSWERS = [
    Answer(sent_s=0.0, token_times_s=[0.5, 0.6, 0.8], num_tokens=3),
    Answer(sent_s=1.0, token_times_s=[1.2], num_tokens=1),
]


def test_latencies_of_answers():
    values = latencies_ms(ANSWERS)
    np.testing.assert_allclose(values["ttft"], [500, 200])
    np.testing.assert_allclose(values["tpot"], [150])
    np.testing.assert_allclose(values["itl"], [100, 200])
    np.testing.assert_allclose(values["e2el"], [800, 200])


def test_rates_and_goodput():
    done = Replay(answers=ANSWERS, num_prompt_tokens=10, wall_s=2.0, client_cpu_s=0.1)
    summary = summarize(done, {"ttft": 300.0})
    assert (summary["requests_per_s"], summary["out_tok_s"], summary["total_tok_s"]) == (1.0, 2.0, 7.0)
    assert summary["goodput_per_s"] == 0.5
    assert summary["ttft_ms"]["mean"] == pytest.approx(350) and summary["ttft_ms"]["p50"] == pytest.approx(350)
    assert "goodput_per_s" not in summarize(done, {})


def test_every_limit_has_to_be_kept_and_one_token_has_no_tpot():
    assert met(ANSWERS[0], {"ttft": 500.1, "tpot": 150.1, "e2el": 800.1})
    assert not met(ANSWERS[0], {"ttft": 500.1, "tpot": 149.0})
    assert not met(ANSWERS[0], {"e2el": 799.0})
    assert met(ANSWERS[1], {"tpot": 1.0})


def test_arrivals_are_a_poisson_process_from_zero_on():
    times = arrivals(4000, 20.0, seed=3)
    gaps = np.diff(times)
    assert times[0] == 0 and (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.1) and gaps.std() == pytest.approx(1 / 20, rel=0.1)
    assert arrivals(5, 20.0, seed=3) == times[:5] and arrivals(3, math.inf, seed=3) == [0.0] * 3


def test_users_wait_for_their_answers():
    open_now, most, lock = [0], [0], threading.Lock()

    def script(fields):
        with lock:
            open_now[0] += 1
            most[0] = max(most[0], open_now[0])
        time.sleep(0.05)
        with lock:
            open_now[0] -= 1
        return right_answer(fields)

    with fake_server(script) as url:
        replay(url, MODEL, [Item([1], 2)] * 8, concurrency=2)
    assert most[0] == 2


def test_requests_are_sent_when_they_come():
    with fake_server(right_answer) as url:
        answers = replay(url, MODEL, [Item([1], 2)] * 2, starts_s=[0.0, 0.3]).answers
    assert 0.29 < answers[1].sent_s - answers[0].sent_s < 1.0


def test_the_command_measures_a_server_and_keeps_what_it_saw(tmp_path, capsys):
    (tmp_path / "workload.json").write_text(to_json(Workload(1, [Item([1, 2], 4), Item([3], 2)])))
    files = {name: tmp_path / name for name in ("out.json", "out.png")}
    with fake_server(right_answer) as url:
        outputs = ["--json", str(files["out.json"]), "--plot", str(files["out.png"])]
        load = ["--workload", str(tmp_path / "workload.json"), "--rate", "50", "--goodput", "ttft:60000"]
        main(["--url", f"theirs={url}", *load, *outputs])
    result = json.loads(files["out.json"].read_text())
    assert result["server"]["name"] == "theirs" and result["rate"] == 50 and result["summary"]["requests"] == 2
    assert result["summary"]["output_tokens"] == 6
    assert result["summary"]["goodput_per_s"] == pytest.approx(result["summary"]["requests_per_s"])
    assert files["out.png"].read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "goodput/s (ttft 60000 ms)" in printed and "| E2EL |" in printed


@pytest.mark.parametrize("text", ["0", "-1", "nan", "fast"])
def test_a_rate_is_a_positive_number(text):
    with pytest.raises(argparse.ArgumentTypeError, match="positive number"):
        _rate(text)


@pytest.mark.parametrize("text", ["itl:5", "ttft", "ttft:x", "ttft:-1"])
def test_a_limit_names_a_latency_and_milliseconds(text):
    with pytest.raises(argparse.ArgumentTypeError, match="must be"):
        _limit(text)
