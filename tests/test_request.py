import math

import pytest

from jaxcb.config import EngineConfig
from jaxcb.errors import ConfigError, RequestError
from jaxcb.request import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("seed", 2**64),
        ("seed", "x"),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2.0),
        ("min_tokens", -1),
        ("stop", [""]),
        ("stop", ""),
        ("stop", [3]),
        ("stop", 3),
        ("stop", ["a"] * 17),
        ("stop", "a" * 1001),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", "12"),
        ("stop_token_ids", list(range(9))),
        ("ignore_eos", 1),
        ("skip_special_tokens", None),
    ],
)
def test_a_bad_parameter_is_refused_by_name(field, value):
    with pytest.raises(RequestError, match=field) as error:
        SamplingParams(**{field: value})
    assert error.value.param == field


def test_min_tokens_may_not_exceed_max_tokens():
    with pytest.raises(RequestError, match="5 > 4"):
        SamplingParams(max_tokens=4, min_tokens=5)
    assert SamplingParams(max_tokens=None, min_tokens=5).min_tokens == 5


def test_a_single_stop_string_and_none_are_understood():
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["ab", "c"]).stop == ("ab", "c")
    assert SamplingParams(stop=None, stop_token_ids=None).stop == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "float64"),
        ("backend", "cuda"),
        ("page_size", 12),
        ("max_num_seqs", 0),
        ("max_model_len", -5),
        ("num_kv_pages", 2.5),
        ("gpu_memory_utilization", 0.0),
        ("admission_watermark", 1.0),
        ("decode_buckets", (0,)),
        ("mixed_buckets", {64}),
        ("seed", None),
    ],
)
def test_a_bad_setting_is_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=field) as error:
        EngineConfig(**{field: value})
    assert error.value.param == field


def test_every_running_sequence_must_fit_the_budget():
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(8\)"):
        EngineConfig(max_num_seqs=16, max_num_batched_tokens=8)
