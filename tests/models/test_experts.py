"""Which experts a token takes, and what becomes of their rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcb.models import experts
from jaxcb.models.experts import Choice, by_token, choose, mixed, tokens_of
from jaxcb.models.spec import ModelSpec
from pallas_kernels import group_rows

SPEC = ModelSpec(
    family="mixtral",
    vocab_size=8,
    hidden_size=4,
    intermediate_size=4,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=4,
    max_position=8,
    num_experts=5,
    num_experts_per_token=2,
)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_token_takes_the_likeliest_and_of_equals_the_first(platform, monkeypatch):
    monkeypatch.setattr(experts, "platform", lambda: platform)
    probabilities = np.array([[0.1, 0.4, 0.2, 0.25, 0.05], [0.2, 0.2, 0.2, 0.2, 0.2], [0.5, 0.0, 0.0, 0.0, 0.5]])
    choice = choose(SPEC, jnp.log(jnp.asarray(probabilities, jnp.float32) + 1e-9))
    assert choice.experts.tolist() == [[1, 3], [0, 1], [0, 4]]
    np.testing.assert_allclose(choice.weights, [[0.4 / 0.65, 0.25 / 0.65], [0.5, 0.5], [0.5, 0.5]], rtol=1e-5)


def test_both_ways_to_find_the_likeliest_agree(monkeypatch):
    scores = jnp.asarray(np.random.default_rng(0).standard_normal((40, 64)).round(1), jnp.float32)
    found = []
    for platform in ("cpu", "gpu"):
        monkeypatch.setattr(experts, "platform", lambda platform=platform: platform)
        found.append(experts._likeliest(scores, 8))
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_rows_that_nobody_has_computed_count_as_0_whatever_they_are():
    """Of another device's experts, or of padding: the second token's second choice and the third token."""
    choice = Choice(jnp.full((3, 2), 0.5), jnp.array([[1, 0], [0, 2], [2, 2]]))
    groups = group_rows(choice.experts, 2)
    x = jnp.array([[1.0], [10.0], [100.0]])
    rows = x[tokens_of(groups, choice)].at[groups.starts[-1] :].set(jnp.nan)
    assert mixed(by_token(rows, groups, choice), choice.weights).tolist() == [[1.0], [5.0], [0.0]]
