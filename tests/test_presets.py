import pytest

from jaxcb.config import EngineConfig
from jaxcb.errors import ConfigError
from jaxcb.presets import PRESETS
from jaxcb.serve.cli import parse
from jaxcb.sim import GPUS, MODELS, limits_on

SINGLE = [name for name, preset in PRESETS.items() if preset.pools is None]
CLUSTERS = [name for name, preset in PRESETS.items() if preset.pools is not None]


@pytest.mark.parametrize("name", SINGLE)
def test_a_preset_is_the_same_configuration_in_a_script_on_the_command_line_and_in_the_simulator(name):
    config = EngineConfig.preset(name)
    for field, value in PRESETS[name].settings.items():
        assert getattr(config, field) == value
    assert parse(["--preset", name])[0] == config
    limits = limits_on(GPUS["h100"], MODELS["8b"], EngineConfig.preset(name, max_model_len=4096))
    assert limits.reservation == config.reservation and limits.prefill_first == config.prefill_first


def test_what_is_given_stands_over_the_preset():
    assert EngineConfig.preset("sarathi", max_num_batched_tokens=1024).max_num_batched_tokens == 1024
    config, _ = parse(["--max-num-batched-tokens", "1024", "--preset", "sarathi", "--model", "some/model"])
    assert (config.max_num_batched_tokens, config.enable_prefix_caching) == (1024, False)
    assert config.model == "some/model"


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_is_no_engine(name):
    with pytest.raises(ConfigError, match="is a cluster of several engines"):
        EngineConfig.preset(name)
    with pytest.raises(ConfigError, match="is a cluster of several engines"):
        parse(["--preset", name])


def test_an_unknown_preset_is_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match=r"preset must be one of fastertransformer, orca, .*mooncake; got 'vlm'"):
        EngineConfig.preset("vlm")


def test_the_thirteen_systems_are_there_each_with_its_source():
    systems = {name.split("-guaranteed")[0].split("-max")[0].removesuffix("-v1") for name in PRESETS}
    assert len(systems) == 13
    assert all(preset.source and preset.models for preset in PRESETS.values())
