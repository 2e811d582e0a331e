from __future__ import annotations

import json

import pytest

from bench.common import BenchError, Spread, make_parser, markdown_table, paired_ratio, percentile, positive, run, save
from jaxcb.errors import ModelError


def test_percentiles_lie_between_neighbours():
    assert percentile([4, 1, 3, 2], 50) == 2.5
    assert percentile(range(101), 95) == 95
    assert percentile([7], 95) == 7


def test_spread_is_median_and_tenths():
    assert Spread.of(range(11)) == (5, 1, 9)


def test_no_measurement_has_no_percentile():
    with pytest.raises(BenchError, match="50th percentile needs at least one"):
        percentile([], 50)


def test_paired_ratio_ignores_what_slows_both_alike():
    ours, theirs = [200, 20, 100], [100, 10, 50]  # the second round met a busy machine
    assert paired_ratio(ours, theirs) == 2
    assert percentile(ours, 50) / percentile(theirs, 50) == 2
    assert paired_ratio([200, 20, 90], [100, 10, 50]) == 2


def test_paired_ratio_needs_pairs():
    with pytest.raises(BenchError, match="got 2 and 1"):
        paired_ratio([1, 2], [1])


def test_table_is_aligned():
    assert markdown_table(["name", "ms"], [["a", 1], ["long name", "10.25"]]).splitlines() == [
        "| name      |    ms |",
        "|-----------|------:|",
        "| a         |     1 |",
        "| long name | 10.25 |",
    ]


def test_results_are_saved_where_asked(tmp_path):
    save(None, {"bench": "x"})
    save(tmp_path / "x.json", {"bench": "x"})
    assert json.loads((tmp_path / "x.json").read_text()) == {"bench": "x"}


@pytest.mark.parametrize("error", [ModelError("no such model"), FileNotFoundError("no such file")])
def test_what_cannot_work_is_one_line(error, capsys):
    def fail():
        raise error

    assert run(fail) == 1
    assert capsys.readouterr().err == f"error: {error}\n"
    assert run(lambda: None) == 0


def test_programming_errors_are_not_hidden():
    with pytest.raises(ZeroDivisionError):
        run(lambda: 1 / 0)


@pytest.mark.parametrize("text", ["0", "-1", "2.5", "x", ""])
def test_counts_are_positive_integers(text, capsys):
    parser = make_parser("x", None, seed=1, seed_help="of nothing")
    parser.add_argument("--rounds", type=positive)
    assert parser.parse_args(["--rounds", "3"]).rounds == 3
    with pytest.raises(SystemExit):
        parser.parse_args(["--rounds", text])
    assert f"must be a positive integer, got {text!r}" in capsys.readouterr().err
