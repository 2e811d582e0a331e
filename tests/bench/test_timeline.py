from __future__ import annotations

import json

import pytest

from bench import timeline
from bench.inprocess import InProcess, LaunchedRow, LaunchedStep
from bench.timeline import Arrival, Timeline, as_text, draw_arrivals, run_timeline
from bench.workload import Item
from jaxcb.step.buckets import Bucket

pytestmark = pytest.mark.xdist_group("bench")  # one worker loads the model for all
MIXED, DECODE = Bucket(4, 2, False), Bucket(2, 2, True)
HAND_MADE = Timeline(
    arrivals=[
        Arrival(name="A", step=0, item=Item([1] * 2, 3)),
        Arrival(name="B", step=1, item=Item([1] * 11, 1)),
    ],
    steps=[
        LaunchedStep(MIXED, (LaunchedRow("A", 2, False),)),
        LaunchedStep(DECODE, (LaunchedRow("A", 1, True),)),
        LaunchedStep(MIXED, (LaunchedRow("A", 1, True), LaunchedRow("B", 11, False))),
    ],
    budget=12,
)


def test_the_text_shows_chunks_tokens_and_waiting():
    assert as_text(HAND_MADE).splitlines() == [
        "step      |   0   1   2",
        "A  2 + 3  |  P2   d   d",
        "B  11 + 1 |       . P11",
        "tokens    |   2   1  12",
    ]


def test_the_run_keeps_the_budget_and_computes_everything(process):
    arrivals = draw_arrivals(process.tokenizer, seed=9, num_requests=8)
    run = run_timeline(process, arrivals, progress=False)
    assert run.budget == 16 and all(step.num_tokens <= 16 for step in run.steps)
    assert any(step.num_tokens == 16 for step in run.steps)
    for arrival in arrivals:
        cells = run.cells(arrival)
        chunks = [int(cell[1:]) for cell in cells if cell.startswith("P")]
        assert sum(chunks) == len(arrival.item.prompt_ids)
        assert cells.count("d") == arrival.item.output_len - 1  # the last chunk gives the first token
        assert not any(cells[: arrival.step])
    waited = [arrival.name for arrival in arrivals if "." in run.cells(arrival)]
    assert waited, "nobody waited: the picture shows nothing of the limits"


def test_nobody_is_waited_for_while_nothing_runs(process):
    late = [Arrival(name="A", step=50, item=Item([5, 6], 2))]
    run = run_timeline(process, late, progress=False)
    assert len(run.steps) == 2


def test_the_command_draws_a_small_picture(process, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(InProcess, "load", lambda config: process)
    png, out = tmp_path / "t.png", tmp_path / "t.json"
    result = timeline.main(["--out", str(png), "--json", str(out), "--num-requests", "5"])
    assert json.loads(out.read_text()) == result
    assert list(result["requests"]) == ["A", "B", "C", "D", "E"]
    assert png.read_bytes().startswith(b"\x89PNG") and 5_000 < png.stat().st_size < 100_000
    assert "tokens " in capsys.readouterr().out


@pytest.mark.parametrize("count", ["0", "27"])
def test_requests_are_named_by_letters(count, capsys):
    with pytest.raises(SystemExit):
        timeline.main(["--num-requests", count])
    assert "--num-requests" in capsys.readouterr().err
