"""A model's generation_config.json gives a request what it leaves out, and its end tokens hold in any case."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxcb.config import EngineConfig
from jaxcb.errors import ConfigError, ModelError
from jaxcb.weights.resolve import ModelFiles, resolve
from tests.serve.tiny_model import write_tiny_model

LLAMA = {"temperature": 0.6, "top_p": 0.9, "do_sample": True, "eos_token_id": [3, 4, 5], "bos_token_id": 1}
EVERYTHING = {"top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05, "max_new_tokens": 2048, "temperature": None}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("generation") / "model")


def files_with(model: Path, config: dict[str, Any]) -> ModelFiles:
    (model / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
    return resolve(str(model))


def test_the_file_s_values_are_the_defaults_under_our_names(model):
    assert files_with(model, LLAMA).read_sampling_defaults("auto") == {"temperature": 0.6, "top_p": 0.9}
    assert files_with(model, EVERYTHING).read_sampling_defaults("auto") == {
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.05,
        "max_tokens": 2048,
    }


def test_none_is_the_engine_s_own_defaults_and_end_tokens_stay(model):
    files = files_with(model, LLAMA)
    assert files.read_sampling_defaults("none") == {}
    assert files.read_spec().eos_token_ids == (3, 4, 5)


def test_the_file_may_lie_elsewhere_or_nowhere(model, tmp_path):
    files = files_with(model, LLAMA)
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": 7}), encoding="utf-8")
    assert files.read_sampling_defaults(str(tmp_path)) == {"top_k": 7}
    with pytest.raises(ModelError, match=r"has no generation_config\.json; other choices are auto and none"):
        files.read_sampling_defaults(str(tmp_path / "nowhere"))
    (model / "generation_config.json").unlink()
    assert files.read_sampling_defaults("auto") == {}


@pytest.mark.parametrize("key, value", [("temperature", -1), ("top_p", "high"), ("max_new_tokens", 0)])
def test_a_value_that_can_not_be_is_an_error_that_names_the_key(model, key, value):
    with pytest.raises(ModelError, match=rf"generation_config\.json: {key}: .*--generation-config none"):
        files_with(model, {key: value}).read_sampling_defaults("auto")


@pytest.mark.parametrize("value", ["", None, 3])
def test_the_setting_is_auto_none_or_a_directory(value):
    with pytest.raises(ConfigError, match="generation_config must be auto, none or a directory") as error:
        EngineConfig(generation_config=value)
    assert error.value.param == "generation_config"
