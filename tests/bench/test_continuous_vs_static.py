from __future__ import annotations

import json

import pytest

from bench.continuous_vs_static import main, static_batches
from bench.workload import Item
from tests.bench.conftest import FLAGS


def test_a_static_batch_runs_as_long_as_its_longest_answer():
    items = [Item([1], 3), Item([2], 9), Item([3], 2), Item([4], 5), Item([5], 7)]
    assert static_batches(items, 2) == [
        [Item([1], 9), Item([2], 9)],
        [Item([3], 5), Item([4], 5)],
        [Item([5], 7)],
    ]


def test_both_ways_generate_what_was_asked_for(tiny, tmp_path, capsys):
    flags = ["--model", str(tiny), *FLAGS]
    result = main(
        [*flags, "--num-requests", "10", "--scale", "0.05", "--rounds", "2", "--json", str(tmp_path / "r.json")]
    )
    assert json.loads((tmp_path / "r.json").read_text()) == result
    assert [len(walls) for walls in result["wall_s"].values()] == [2, 2]
    pairs = zip(result["wall_s"]["static"], result["wall_s"]["continuous"], strict=True)
    assert result["ratio"] == pytest.approx(sum(static / continuous for static, continuous in pairs) / 2)
    assert 0 < result["static_wasted_share"] < 1
    printed = capsys.readouterr().out
    assert "| static     |" in printed and "continuous / static: x" in printed


@pytest.mark.parametrize("scale", ["0", "-1", "1.5", "nan"])
def test_scales_that_mean_nothing_are_refused(scale, capsys):
    with pytest.raises(SystemExit):
        main(["--scale", scale])
    assert "--scale must be in (0, 1]" in capsys.readouterr().err
