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


def test_the_default_lists_waste_little_and_are_short(tmp_path):
    main(["--num-requests", "600", "--json", str(tmp_path / "padding.json")])
    rows = json.loads((tmp_path / "padding.json").read_text())["rows"]
    chosen = {row["platform"]: row for row in rows if row["buckets"] == "default, exact_fill"}
    for row in chosen.values():
        assert row["programs"] <= 16
        assert set(row["wasted"]) == set(USERS)
        assert all(part < 0.12 for part in row["wasted"].values())
    one_each = next(row for row in rows if row["buckets"] == "one each")
    assert one_each["programs"] == 2 and one_each["wasted"]["few"] > 0.5
