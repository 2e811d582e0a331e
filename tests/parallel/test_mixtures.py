"""Whole experts on several devices, in everything else that there is: the answers of one device."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import GOLDEN
from tests.parallel.process import on_devices

MODELS = [str(GOLDEN / "tiny" / name) for name in ("mixtral", "qwen3_moe")]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return on_devices(4, "mixtures", *MODELS)


@pytest.mark.parametrize("shape", ["two", "behind one queue", "apart"])
def test_answers_are_one_devices_and_so_are_those_with_other_weights(found, shape):
    whole = found["one"]
    assert found[shape]["tokens"] == whole["tokens"]
    assert found[shape]["others"] == whole["others"]
    assert whole["others"] != whole["tokens"][:3]


def test_pages_were_swapped_and_handed_over_and_both_engines_of_a_queue_answered(found):
    assert found["one"]["swaps"] > 0 and found["two"]["swaps"] > 0
    assert found["apart"]["handed over"] == 5, "all but the short prompt"
    assert min(found["behind one queue"]["ended"]) > 0


@pytest.mark.parametrize("model", MODELS)
def test_each_device_is_given_its_experts_of_a_models_files(found, model):
    assert all(found["files"][model])
