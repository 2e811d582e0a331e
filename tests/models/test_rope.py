"""Position scaling as configs name it, against what transformers makes of the same configs (tests/golden)."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxcb.models.rope import rope_tables
from jaxcb.models.spec import ModelSpec
from tests.conftest import GOLDEN

STORED = json.loads((GOLDEN / "rope.json").read_text(encoding="utf-8"))
POSITIONS = np.asarray([0, 1, 29, 63, 64, 249, 255])


@pytest.mark.parametrize("name", STORED["cases"])
def test_angles_are_those_of_transformers(name):
    """mlxcel#1355, sglang#2943, lorax#348, llama.cpp#8676: a scaling was read, under its old key or its new one, and
    never applied, or the longer context was refused. Every kind through the whole model: ``test_decoder.py``."""
    case = STORED["cases"][name]
    spec = ModelSpec.from_hf_config(STORED["shape"] | case["config"])
    assert spec.max_position == 256
    angles = POSITIONS[:, None] * np.asarray(case["frequencies"])
    cos, sin = rope_tables(spec.rope, spec.head_dim, jnp.asarray(POSITIONS))
    np.testing.assert_allclose(cos, np.cos(angles) * case["attention_scaling"], atol=1e-4)
    np.testing.assert_allclose(sin, np.sin(angles) * case["attention_scaling"], atol=1e-4)


def test_the_stored_configs_differ_in_what_they_do():
    """So that one whose scaling is left out, or taken for another, shows."""
    distinct = {(*np.round(case["frequencies"], 6), case["attention_scaling"]) for case in STORED["cases"].values()}
    assert len(distinct) == 12
