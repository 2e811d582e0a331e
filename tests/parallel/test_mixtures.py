"""Whole experts on several devices, in everything else that there is: the answers of one device."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import GOLDEN
from tests.parallel.process import on_devices

MODELS = [str(GOLDEN / "tiny" / name) for name in ("mixtral", "qwen3_moe")]


@pytest.fixture(scope="module")
def found() -> list[Any]:
    """On one device, on two, and what is loaded of each model's files."""
    return on_devices(4, "mixtures", "alone", *MODELS)


def test_answers_are_one_devices_and_so_are_those_with_other_weights(found):
    one, two = found[:2]
    assert (two["tokens"], two["others"]) == (one["tokens"], one["others"])
    assert one["others"] != one["tokens"][:3]
    assert one["swaps"] > 0 and two["swaps"] > 0


def test_each_device_is_given_its_experts_of_a_models_files(found):
    for same in found[2:]:
        assert same and all(same)


@pytest.mark.slow
def test_two_such_engines_behind_one_queue_or_one_of_prompts_and_one_of_answers_do_the_same(found):
    behind_one_queue, apart = on_devices(4, "mixtures", "together")
    for each in (behind_one_queue, apart):
        assert (each["tokens"], each["others"]) == (found[0]["tokens"], found[0]["others"])
    assert min(behind_one_queue["ended"]) > 0
    assert apart["handed over"] == 5, "all but the short prompt"
