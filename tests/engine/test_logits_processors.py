"""Logits processors of the user's own: what they do to their requests, and that they leave the others alone."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxcb import logits_processor
from jaxcb.cluster import Replicas
from jaxcb.engine import OutputStream, prepare
from jaxcb.errors import ConfigError, RequestError
from jaxcb.logits_processor import LogitsProcessor
from jaxcb.request import Request, SamplingParams
from tests.engine.conftest import SPEC
from tests.engine.run import complete

V = SPEC.vocab_size


def _boost_start(arguments, prompt):
    if "boost" not in arguments:
        return None
    return {"ids": np.asarray(arguments["boost"], np.int32), "by": np.float32(1e4)}


BOOST = LogitsProcessor(
    blank={"ids": np.zeros(2, np.int32), "by": np.float32(0)},
    start=_boost_start,
    apply=lambda logits, state: logits.at[jnp.arange(logits.shape[0])[:, None], state["ids"]].add(state["by"][:, None]),
    arguments=("boost",),
)
"""Two ids that a request wants."""

COUNT_UP = LogitsProcessor(
    blank=np.int32(0),
    start=lambda arguments, prompt: len(prompt) % V if arguments.get("count") else None,
    apply=lambda logits, state: jnp.where(jnp.arange(logits.shape[1]) == state[:, None], logits, -jnp.inf),
    update=lambda state, token_ids: (token_ids + 3) % V,
    arguments=("count",),
)
"""The first token is the prompt's length, each later one 3 more than the one before."""

PROCESSORS = (BOOST, COUNT_UP)
WITH = {
    "logits_processors": PROCESSORS,
    "num_kv_pages": 44,
    "admission_watermark": 0.0,
}
"""Without pages for six answers of a hundred tokens. One engine, since its samplers are compiled in every run."""


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, V, length).tolist()


def twenty(**fields: object) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 20, "ignore_eos": True} | fields))


def test_each_request_has_its_own_state_and_the_others_are_left_alone(make_engines):
    plain, engine = make_engines(), make_engines(**WITH)
    prompts = [prompt(seed, 10 + seed) for seed in range(4)]
    free = complete(plain, prompts, twenty())
    counting = {"extra_args": {"count": True}}
    params = [
        twenty(),
        twenty(**counting),
        twenty(extra_args={"boost": [7, 9]}),
        twenty(**counting, temperature=1.0, seed=1),
    ]
    outputs = complete(engine, prompts, params)
    assert outputs[0].token_ids == free[0].token_ids
    for output in (outputs[1], outputs[3]):
        first = len(output.prompt_token_ids)
        assert output.token_ids == [(first + 3 * i) % V for i in range(20)]
    assert set(outputs[2].token_ids) <= {7, 9}
    again = complete(engine, prompts, twenty())
    assert [output.token_ids for output in again] == [output.token_ids for output in free], "a slot kept its old state"


def test_the_state_outlives_a_preemption(make_engines):
    engine = make_engines(**WITH)
    prompts = [prompt(seed, 60) for seed in range(6)]
    outputs = complete(engine, prompts, twenty(max_tokens=100, extra_args={"count": True}))
    assert sum(output.num_preemptions for output in outputs) > 0
    for output in outputs:
        assert output.token_ids == [(60 + 3 * i) % V for i in range(100)]


def test_they_come_before_the_other_parameters(make_engines):
    engine = make_engines(**WITH)
    allowed = twenty(extra_args={"boost": [7, 9]}, allowed_token_ids=(9, 11), max_tokens=3)
    [output] = complete(engine, [prompt(0, 5)], allowed)
    assert output.token_ids == [9, 9, 9]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [({"bost": 1}, "bost"), ({"boost": [1, 2, 3]}, "shape"), ({"boost": ["a", "b"]}, "refused"), ([1], "mapping")],
)
def test_arguments_that_nobody_understands_are_refused(make_engines, arguments, reason):
    engine = make_engines(**WITH)
    with pytest.raises(RequestError, match=reason) as error:
        engine.submit(Request(request_id="a", prompt_token_ids=[1, 2], sampling=twenty(extra_args=arguments)))
    assert error.value.param == "extra_args"


def test_an_engine_without_processors_refuses_arguments(make_engines):
    with pytest.raises(RequestError, match="extra_args"):
        make_engines().submit(Request(request_id="a", prompt_token_ids=[1], sampling=twenty(extra_args={"x": 1})))


def test_what_is_no_processor_is_refused_by_name(make_engines):
    with pytest.raises(ConfigError, match="logits_processors"):
        make_engines(logits_processors=(lambda logits: logits,))


def test_what_would_be_refused_behind_a_queue_is_refused_before_it(make_engines, monkeypatch):
    """A processor's start and the words are made where the client waits, once."""
    engine = make_engines(**WITH)
    replicas = Replicas([engine])
    started = []

    def start_states(processors, extra_args, prompt):
        started.append(extra_args)
        return logits_processor.start_states(processors, extra_args, prompt)

    monkeypatch.setattr(prepare, "start_states", start_states)

    def submit(**fields: object) -> OutputStream:
        return replicas.submit(Request(request_id="a", prompt_token_ids=prompt(1, 9), sampling=twenty(**fields)))

    with pytest.raises(RequestError, match="a logits processor refused the request"):
        submit(extra_args={"boost": "x"})
    with pytest.raises(RequestError, match="bad_words"):
        submit(bad_words=["x" * 100])
    started.clear()
    [*_, last] = submit(extra_args={"boost": [11, 12]}, bad_words=["y"])
    assert set(last.token_ids) <= {11, 12} and len(started) == 1


def test_a_fork_that_a_processor_refuses_leaves_nothing_behind(make_engines):
    engine = make_engines(**WITH)
    parent = engine.submit_blocking(Request(request_id="a", prompt_token_ids=prompt(1, 9), sampling=twenty()))
    child = Request(request_id="b", prompt_token_ids=prompt(1, 9), sampling=twenty(extra_args={"boost": "x"}))
    with pytest.raises(RequestError, match="refused"):
        engine.fork([parent], [(child, 0)], blocking=True)
    list(parent)
    assert not engine._inbox.open_keys()
