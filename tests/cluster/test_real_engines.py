"""Replicas over engines that compute, against one of these alone."""

from __future__ import annotations

import numpy as np
import pytest

from jaxcb.beam import BeamParams
from jaxcb.cluster import Replicas
from jaxcb.generate import beam_search, generate
from jaxcb.request import Request, SamplingParams
from tests.engine.conftest import backend, make_engines, params, tokenizer  # noqa: F401  # fixtures

PREFIX = list(range(100))


def test_two_real_engines_answer_as_one_and_reuse_the_beginning(make_engines):  # noqa: F811  # the fixture
    replicas = Replicas([make_engines(num_kv_pages=100), make_engines(num_kv_pages=101)])
    sampling = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    asked = [Request(request_id=str(i), prompt_token_ids=[*PREFIX, i], sampling=sampling) for i in (1, 2, 1, 2)]
    outputs = [list(replicas.submit(one))[-1] for one in asked]
    assert outputs[0].token_ids == outputs[2].token_ids and outputs[1].token_ids == outputs[3].token_ids
    assert [output.num_cached_tokens for output in outputs] == [0, 96, 96, 96]


def test_everything_that_one_real_engine_does_several_do_alike(make_engines):  # noqa: F811
    one = make_engines(num_kv_pages=102)
    replicas = Replicas([make_engines(num_kv_pages=100), make_engines(num_kv_pages=101)])
    prompts = [[(7 * i + j) % 250 for j in range(30)] for i in range(6)]
    wanted = SamplingParams(n=2, max_tokens=6, temperature=0.9, seed=3, ignore_eos=True)

    def answers(engine) -> list[list[list[int]]]:
        outputs = generate(prompts, wanted, engine=engine, progress=False)
        return [[list(choice.token_ids) for choice in output.choices] for output in outputs]

    assert answers(replicas) == answers(one)
    np.testing.assert_allclose(replicas.embed(prompts), one.embed(prompts), atol=1e-5)
    pairs = [(prompt, [5, 6]) for prompt in prompts]
    assert [score.logprob for score in replicas.score(pairs)] == pytest.approx(
        [score.logprob for score in one.score(pairs)], abs=1e-4
    )
    beams = [
        beam_search(prompts[:3], BeamParams(width=3, max_tokens=4), engine=engine, progress=False)
        for engine in (replicas, one)
    ]
    assert [[c.token_ids for c in output.choices] for output in beams[0]] == [
        [c.token_ids for c in output.choices] for output in beams[1]
    ]
    assert min(sum(stats.finished.values()) for stats in replicas.stats_by_engine().values()) > 3
    assert not replicas._open and not any(member.load for member in replicas._members)


def test_a_real_engine_that_fails_loses_nothing_that_had_not_begun(make_engines, monkeypatch):  # noqa: F811
    failing, other = make_engines(seed=41), make_engines(seed=42)
    prompts = [[(3 * i + j) % 250 for j in range(20)] for i in range(4)]
    wanted = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    expected = [output.token_ids for output in generate(prompts, wanted, engine=other, progress=False)]

    def fail() -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(failing._core, "step", fail)
    replicas = Replicas([failing, other])
    outputs = generate(prompts, wanted, engine=replicas, progress=False)
    assert [output.token_ids for output in outputs] == expected
    assert [stats.state for stats in replicas.stats_by_engine().values()] == ["stopped", "ok"]
