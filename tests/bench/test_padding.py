import json

import pytest

from bench.padding import USERS, Buckets, Step, main, platforms


def test_waste_is_the_padding_of_computed_tokens():
    buckets = Buckets("two", decode=(4, 8), mixed=(32, 64))
    steps = [Step(3, True), Step(8, True), Step(33, False)]
    assert buckets.wasted(steps) == pytest.approx(1 - 44 / 76)


def test_the_largest_sizes_are_always_there():
    gpu = platforms()[0]
    buckets = Buckets("none", (), ()).within(gpu.limits)
    assert buckets.decode == (gpu.limits.max_num_seqs,) and buckets.mixed == (gpu.limits.max_num_batched_tokens,)


def test_the_default_lists_waste_little_and_are_short(tmp_path, monkeypatch):
    cpu = platforms()[1]
    monkeypatch.setattr("bench.padding.platforms", lambda: [cpu])
    main(["--num-requests", "200", "--json", str(tmp_path / "padding.json")])
    rows = {row["buckets"]: row for row in json.loads((tmp_path / "padding.json").read_text())["rows"]}
    chosen = rows["default, exact_fill"]
    assert chosen["programs"] <= 16 and set(chosen["wasted"]) == set(USERS)
    assert all(part < 0.12 for part in chosen["wasted"].values())
    assert all(chosen["wasted"][name] < rows["default"]["wasted"][name] for name in USERS)
    assert rows["one each"]["programs"] == 2 and rows["one each"]["wasted"]["few"] > 0.5
