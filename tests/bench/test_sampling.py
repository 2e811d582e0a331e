from __future__ import annotations

import json

import jax
import numpy as np

from bench import sampling
from jaxcb.sampling import Tier, sample


def test_the_way_by_sorting_cuts_the_same_tokens_off():
    """Else the times would be those of different work: over many rows both draw the same set of tokens."""
    rng = np.random.default_rng(3)
    count = 4_000
    logits = np.repeat(rng.standard_normal((1, 300), np.float32) * sampling.DEVIATION, count, 0)
    draws = sampling.draws_of(count, rng)
    by_sorting = np.unique(jax.jit(sampling.sample_by_sorting)(logits, draws))
    ours = np.unique(sample(jax.numpy.asarray(logits), draws, tier=Tier.TRUNCATED)[0])
    assert set(by_sorting) == set(ours) and 5 < len(ours) <= sampling.TOP_K


def test_the_command_prints_every_shape(tmp_path, capsys):
    flags = ["--vocabularies", "300,500", "--rows", "1,2", "--rounds", "2", "--json", str(tmp_path / "s.json")]
    result = sampling.main(flags)
    assert json.loads((tmp_path / "s.json").read_text()) == result
    assert [(row["vocabulary"], row["rows"]) for row in result["rows"]] == [(300, 1), (300, 2), (500, 1), (500, 2)]
    assert all(row["sort"] > 0 and row["ratio"] > 0 for row in result["rows"])
    assert "sort / truncated" in capsys.readouterr().out
