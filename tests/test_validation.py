from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxcb.config import EngineConfig
from jaxcb.errors import ConfigError, RequestError
from jaxcb.request import Request, SamplingParams
from jaxcb.validation import check_vocabulary, token_ids


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "1"),
        ("temperature", 10**400),
        ("temperature", float("nan")),
        ("temperature", True),
        ("temperature", np.array([1.0])),
        ("top_k", 1.0),
        ("top_k", None),
        ("max_tokens", -(10**400)),
        ("seed", 2**63),
        ("seed", "7"),
        ("stop", b"x"),
        ("stop", {"a": 1}),
        ("stop", [b"x"]),
        ("stop_token_ids", "12"),
        ("stop_token_ids", [1.5]),
        ("stop_token_ids", 5),
        ("ignore_eos", 1),
    ],
)
def test_a_wrong_sampling_value_is_an_error_that_names_the_field(field: str, value: Any):
    with pytest.raises(RequestError, match=field) as error:
        SamplingParams(**{field: value})
    assert error.value.param == field
    assert len(str(error.value)) < 300


def test_an_integer_too_long_to_print_is_refused_all_the_same():
    with pytest.raises(RequestError, match="too large to show"):
        SamplingParams(max_tokens=-(10**5000))


def test_numpy_scalars_become_plain_numbers():
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(3), seed=np.uint32(7), stop_token_ids=np.array([1, 2], np.int32)
    )
    assert (params.temperature, params.top_k, params.seed, params.stop_token_ids) == (0.5, 3, 7, (1, 2))
    assert {type(params.temperature), type(params.top_k), type(params.seed)} == {float, int}
    config = EngineConfig(max_num_seqs=np.int64(4), decode_buckets=[1, np.int32(2)])
    assert config.max_num_seqs == 4 and config.decode_buckets == (1, 2) and hash(config)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", 5),
        ("model", b"x"),
        ("revision", 1.0),
        ("dtype", "float16"),
        ("dtype", ["auto"]),
        ("backend", "cuda"),
        ("max_num_seqs", 0),
        ("max_num_seqs", "8"),
        ("num_kv_pages", 2.0),
        ("max_waiting", True),
        ("decode_buckets", 4),
        ("decode_buckets", (0,)),
        ("mixed_buckets", ("a",)),
        ("page_size", 17),
        ("gpu_memory_utilization", "0.9"),
        ("gpu_memory_utilization", 1.5),
        ("admission_watermark", -0.1),
        ("run_ahead", 1),
        ("enable_prefix_caching", "yes"),
        ("seed", 1.5),
    ],
)
def test_a_wrong_config_value_is_an_error_that_names_the_field(field: str, value: Any):
    with pytest.raises(ConfigError, match=field) as error:
        EngineConfig(**{field: value})
    assert error.value.param == field


def test_a_path_is_a_model():
    assert EngineConfig(model=Path("a") / "b").model == str(Path("a") / "b")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", 5),
        ("request_id", ""),
        ("sampling", {}),
        ("sampling", None),
        ("prompt", b"bytes"),
        ("prompt", "text"),
        ("prompt", 5),
        ("prompt", {1: 2}),
        ("prompt", [1, "2"]),
        ("prompt", [1, True]),
        ("prompt", np.zeros((1, 2), np.int32)),
        ("prompt", np.zeros(2, np.float32)),
    ],
)
def test_a_request_of_the_wrong_types_is_refused(field: str, value: Any):
    fields = {"request_id": "a", "prompt_token_ids": [1], "sampling": SamplingParams()}
    fields["prompt_token_ids" if field == "prompt" else field] = value
    with pytest.raises(RequestError, match=field) as error:
        Request(**fields)
    assert error.value.param == field


@pytest.mark.parametrize("ids", [[1, 2], (1, 2), range(1, 3), np.array([1, 2], np.uint16), [np.int32(1), 2]])
def test_token_ids_come_in_many_kinds(ids: Any):
    kept = token_ids("prompt", ids)
    assert kept == [1, 2] and {type(token) for token in kept} == {int}


def test_a_request_keeps_a_list_of_its_own():
    given = [1, 2]
    request = Request(request_id="a", prompt_token_ids=given)
    given.append(3)
    assert request.prompt_token_ids == [1, 2]


@pytest.mark.parametrize("token", [-1, 10, 10**30])
def test_ids_outside_the_vocabulary_are_named(token: int):
    check_vocabulary("prompt", [], 10)
    check_vocabulary("prompt", [0, 9], 10)
    with pytest.raises(RequestError, match=f"token id {token}; .* ids 0 to 9"):
        check_vocabulary("prompt", [0, token, 9], 10)
