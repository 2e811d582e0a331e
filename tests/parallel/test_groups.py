"""Tensor parallel engines side by side: data parallel, and prefill apart from decode."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxcb.devices import Placement
from jaxcb.errors import ConfigError
from jaxcb.weights.placed import placed
from tests.engine.conftest import SPEC, sensitive_params
from tests.parallel.process import on_devices


def test_engines_that_are_cut_over_two_devices_each_answer_as_one_device_does():
    found = on_devices(4, "groups")
    for name in ("replicas", "apart"):
        tokens, places = found[name]
        assert tokens == found["whole"], name
        assert places == [[0, 1], [2, 3]], name
    assert min(found["ended"]) > 0
    assert found["handed over"] >= 4, "all but a short prompt and one whose log-probabilities are wanted"


def test_weights_in_parts_are_not_for_another_number_of_devices():
    params = sensitive_params(SPEC, seed=3)
    table = params["embed"]["embedding"]
    params["embed"]["embedding"] = np.zeros((4, *table.shape), table.dtype)
    with pytest.raises(ConfigError, match="cut into 4 parts, and the engine has 1 devices") as error:
        placed(params, SPEC, Placement((jax.local_devices()[0],)))
    assert error.value.param == "tensor_parallel_size"
