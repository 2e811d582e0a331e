"""A model that is cut over several devices answers as on one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxcb.config import EngineConfig
from jaxcb.engine import Engine
from jaxcb.errors import ConfigError
from jaxcb.models.parallel import check_divides
from jaxcb.weights.__main__ import main as convert
from tests.conftest import GOLDEN
from tests.engine.conftest import SPEC, sensitive_params
from tests.parallel.process import on_devices

LOGPROBS = 2e-4
"""Most that log-probabilities differ, of logits of up to some hundred in float32: sums are taken in another order."""


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """On one device, and on four."""
    return on_devices(4, "cut", "answers")


def test_tokens_are_those_of_one_device(found):
    whole, cut = found
    assert cut["tokens"] == whole["tokens"]
    assert min(each["swaps"] for each in found) > 0, "pages moved to host memory and back, too"


def test_devices_add_up_twice_a_layer(found):
    """A program for CPUs has one layer, in a loop; the third sum is the embedding's."""
    whole, cut = found
    assert set(whole["sums"]) == {0}
    assert set(cut["sums"]) == {3}


def test_logprobs_and_embeddings_are_those_of_one_device_up_to_rounding(found):
    whole, cut = found
    np.testing.assert_allclose(cut["logprobs"], whole["logprobs"], atol=LOGPROBS)
    np.testing.assert_allclose(cut["embedding"], whole["embedding"], atol=1e-5)


def test_pages_are_handed_to_an_engine_on_another_number_of_devices_and_back(found):
    _, cut = found
    assert cut["handed"] == [192, 192], "twelve full pages each way"
    assert cut["same with pages of the other"]


def test_weights_are_replaced_and_the_memory_of_pages_given_back_and_taken_again(found):
    for each in found:
        assert each["other with other weights"]
        assert each["same after sleep"]
        assert each["compiles"] == 0


def test_experts_are_cut_or_shared_out_and_answer_as_on_one_device():
    """One sum after them joins the devices' shares either way: as many as without experts."""
    whole, cut, *shared = on_devices(4, "cut", "experts")
    assert set(whole["sums"]) == {0}
    for found in (cut, *shared):
        assert set(found["sums"]) == {3}
        assert found["tokens"] == whole["tokens"]
        np.testing.assert_allclose(np.concatenate(found["logprobs"]), np.concatenate(whole["logprobs"]), atol=LOGPROBS)
    assert whole["shapes"] == [[8, 48], [8, 96, 48], [8, 48, 48]]
    assert cut["shapes"] == [[8, 48], [2, 8, 48, 48], [2, 8, 48, 24]]
    assert [found["shapes"][1] for found in shared] == [[2, 4, 96, 48], [4, 2, 96, 48]]
    assert len({tuple(tokens) for tokens in whole["tokens"]}) == 4, "equal answers would mean nothing"


@pytest.mark.parametrize(
    ("changes", "expert_parallel", "message"),
    [
        ({"num_experts": 6}, True, "the model's 6 experts, got 4"),
        ({"num_experts": 6, "intermediate_size": 90}, False, "90 features of an expert, got 4"),
        ({}, True, "enable_expert_parallel is for models with experts, which this llama model has none of"),
    ],
)
def test_experts_that_do_not_divide_are_refused_with_their_number(changes, expert_parallel, message):
    mixture = {"family": "mixtral", "num_experts_per_token": 2}
    spec = dataclasses.replace(SPEC, num_heads=8, **(mixture | changes if changes else {}))
    with pytest.raises(ConfigError, match=message):
        check_divides(spec, 4, expert_parallel=expert_parallel)


def test_whole_experts_need_several_devices():
    with pytest.raises(ConfigError, match="set tensor_parallel_size") as error:
        EngineConfig(enable_expert_parallel=True)
    assert error.value.param == "enable_expert_parallel"


@pytest.mark.slow
def test_deterministic_answers_have_the_same_bits_in_any_company():
    assert on_devices(4, "cut", "bits") == [True, True]


def test_each_device_is_given_its_parts_of_a_models_files(tmp_path: Path):
    tiny = GOLDEN / "tiny" / "qwen3"
    assert convert(["convert", str(tiny), str(tmp_path / "orbax"), "--format", "orbax"]) == 0
    whole, *cut = on_devices(4, "cut", "files", str(tiny), str(tmp_path / "orbax"))
    assert cut == [whole, whole]


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({"num_heads": 6, "num_kv_heads": 6}, 4, "the model's 6 heads, got 4"),
        ({"num_heads": 8, "num_kv_heads": 8, "intermediate_size": 90}, 4, "90 features of the MLP, got 4"),
        ({"num_heads": 12, "num_kv_heads": 6}, 4, "6 KV heads or be a multiple of them, got 4"),
    ],
)
def test_a_model_that_does_not_divide_is_refused_with_its_numbers(changes, size, message):
    with pytest.raises(ConfigError, match=message) as error:
        check_divides(dataclasses.replace(SPEC, **changes), size)
    assert error.value.param == "tensor_parallel_size"


@pytest.mark.parametrize(
    ("name", "value"),
    [("quantization", "int8"), ("kv_cache_dtype", "int8"), ("fast_norm", True), ("tensor_parallel_size", 0)],
)
def test_what_only_one_device_can_is_refused_on_more(name, value):
    with pytest.raises(ConfigError) as error:
        EngineConfig(**({"tensor_parallel_size": 2} | {name: value}))
    assert error.value.param == name


def test_more_devices_than_there_are_are_refused_before_anything_is_loaded():
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 64 needs 64 devices"):
        Engine.start(EngineConfig(model=(SPEC, sensitive_params(SPEC, 0)), tensor_parallel_size=64), progress=False)
