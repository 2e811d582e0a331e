"""Beam search finds what transformers finds, what there is to find, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax
from starlette.testclient import TestClient

from jaxcb.beam import BeamParams
from jaxcb.config import EngineConfig
from jaxcb.engine import Engine
from jaxcb.engine.beams import search
from jaxcb.errors import RequestError
from jaxcb.generate import beam_search
from jaxcb.request import FinishReason, Request
from jaxcb.serve.app import make_app
from tests.conftest import GOLDEN
from tests.engine.conftest import SPEC, sensitive_params, tokenizer  # noqa: F401  # a fixture
from tests.models.test_decoder import load
from tests.step.forward import teacher_forced

pytestmark = pytest.mark.xdist_group("beam")  # the engine of this file is shared by its tests
CASES = json.loads((GOLDEN / "beams.json").read_text(encoding="utf-8"))
FLAGS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 10,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
    "num_kv_pages": 100,
    "decode_buckets": (),
    "mixed_buckets": (),
}


@pytest.fixture(scope="module")
def engine(tokenizer):  # noqa: F811  # the fixture
    spec, params = load(GOLDEN / "tiny" / "llama", "float32")
    with Engine("tiny", spec, params, tokenizer, EngineConfig(**FLAGS)) as engine:
        engine.compile(progress=False)
        engine.run()
        yield engine
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_pages_used) == (0, 0, 0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_answers_and_scores_are_those_of_transformers(engine, case):
    params = BeamParams(
        width=case["width"],
        max_tokens=8,
        length_penalty=case["length_penalty"],
        early_stopping=case["early_stopping"],
        ignore_eos=True,
        stop_token_ids=tuple(case["end_ids"]),
    )
    [best] = beam_search([case["prompt"]], params, engine=engine, progress=False)
    assert [list(answer.token_ids) for answer in best.choices] == case["answers"]
    np.testing.assert_allclose([answer.score for answer in best.choices], case["scores"], atol=1e-4)
    for answer in best.choices:
        ended = answer.token_ids[-1] in case["end_ids"]
        assert answer.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
        assert answer.stop_reason == (answer.token_ids[-1] if ended else None)
    assert best.token_ids == best.choices[0].token_ids and best.score == best.choices[0].score


def test_with_as_many_beams_as_tokens_nothing_is_missed(tokenizer):  # noqa: F811  # the fixture
    """All 12 ** 2 answers, by hand: the beams after the first token are all that there are."""
    spec = dataclasses.replace(SPEC, vocab_size=12)
    weights = sensitive_params(spec, seed=8)
    prompt = [3, 1, 4, 1, 5]
    first = log_softmax(np.asarray(teacher_forced(spec, weights, prompt))[-1].astype(np.float64))
    scores = {}
    for token in range(12):
        second = log_softmax(np.asarray(teacher_forced(spec, weights, [*prompt, token]))[-1].astype(np.float64))
        scores |= {(token, other): first[token] + second[other] for other in range(12)}
    wanted = sorted(scores, key=lambda answer: -scores[answer])[:12]
    with Engine("twelve", spec, weights, tokenizer, EngineConfig(**FLAGS | {"max_num_seqs": 24})) as engine:
        engine.compile(progress=False)
        engine.run()
        params = BeamParams(width=12, max_tokens=2, length_penalty=0.0)
        [best] = beam_search([prompt], params, engine=engine, progress=False)
        assert [tuple(answer.token_ids) for answer in best.choices] == wanted
        np.testing.assert_allclose([answer.score for answer in best.choices], [scores[a] for a in wanted], atol=1e-4)


def test_beams_share_the_pages_of_their_beginning(engine):
    """A fork computes one token: all but the last come from its parent, the page in which they part too."""
    prompt = [(7 * i) % 250 for i in range(40)]
    before = engine.stats()
    beam_search([prompt], BeamParams(width=5, max_tokens=6), engine=engine, progress=False)
    after = engine.stats()
    asked = after.prompt_tokens - before.prompt_tokens
    computed = asked - (after.prompt_tokens_cached - before.prompt_tokens_cached)
    assert asked >= 40 + 5 * 5 * 41
    assert computed <= 40 + 5 * 5, "no beam computes its beginning again"


def test_without_room_for_parents_and_children_the_answers_are_the_same(engine):
    """Ten beams fill all places, so a fork waits until its parent has ended."""
    prompts = [[5, 6, 7], [9] * 30]
    narrow = [beam_search([p], BeamParams(width=10, max_tokens=5), engine=engine, progress=False)[0] for p in prompts]
    spec, params = engine.spec, engine._runner.params
    wide = EngineConfig(**FLAGS | {"max_num_seqs": 24})
    with Engine("tiny", spec, params, engine.tokenizer, wide) as roomy:
        roomy.compile(progress=False)
        roomy.run()
        for prompt, found in zip(prompts, narrow, strict=True):
            [best] = beam_search([prompt], BeamParams(width=10, max_tokens=5), engine=roomy, progress=False)
            assert [a.token_ids for a in best.choices] == [a.token_ids for a in found.choices]


def test_a_search_that_is_left_early_leaves_nothing_running(engine):
    request = Request(request_id="left", prompt_token_ids=[5, 6, 7])
    searching = search(engine, request, BeamParams(width=4, max_tokens=100, ignore_eos=True), blocking=True)
    streams = next(searching)
    for _ in range(3):
        parents, outputs = streams, [next(stream) for stream in streams]
        streams = searching.send(outputs)
    assert {list(parent)[-1].finish_reason for parent in parents} == {FinishReason.ABORT}, "forks took their places"
    searching.close()
    for stream in streams:
        assert list(stream)[-1].finish_reason is FinishReason.ABORT
    deadline_s = time.monotonic() + 10
    while engine.stats().num_running:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"width": 0}, "width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"early_stopping": "soon"}, "early_stopping"),
        ({"stop_token_ids": ("x",)}, "stop_token_ids"),
    ],
)
def test_values_that_can_not_be_are_refused_by_name(fields, param):
    with pytest.raises(RequestError) as error:
        BeamParams(**fields)
    assert error.value.param == param


@pytest.mark.parametrize(
    ("prompt", "fields", "param"),
    [([5], {"width": 11}, "width"), ([5] * 120, {"max_tokens": 9}, "max_tokens"), ([300], {}, "prompt")],
)
def test_a_search_that_can_never_run_is_refused_before_it_starts(engine, prompt, fields, param):
    with pytest.raises(RequestError, match=r"prompts\[\d\]: ") as error:
        beam_search([[5], prompt], BeamParams(**fields), engine=engine, progress=False)
    assert error.value.param == param


# ---------------------------------------------------------------- over HTTP


@pytest.fixture
def client(engine):
    with TestClient(make_app(engine), raise_server_exceptions=False) as client:
        yield client


def test_the_answers_over_http_are_those_of_python(client, engine, monkeypatch):
    case = CASES[40]
    params = BeamParams(width=5, max_tokens=8, length_penalty=2.0, early_stopping="never", ignore_eos=True)
    [best] = beam_search([case["prompt"]], params, engine=engine, progress=False)
    body = {"use_beam_search": True, "n": 5, "max_tokens": 8, "length_penalty": 2.0, "early_stopping": "never"}
    both = client.post("/v1/completions", json={**body, "ignore_eos": True, "prompt": [case["prompt"], [7]]}).json()
    assert [choice["index"] for choice in both["choices"]] == list(range(10))
    assert [choice["text"] for choice in both["choices"]][:5] == [answer.text for answer in best.choices]
    assert both["usage"]["prompt_tokens"] == len(case["prompt"]) + 1
    assert both["usage"]["completion_tokens"] == 80
    monkeypatch.setattr(engine.tokenizer, "chat_template", "{{ messages[0].content }}")
    messages = [{"role": "user", "content": "hi"}]
    chat = client.post("/v1/chat/completions", json={**body, "messages": messages}).json()
    ids = engine.tokenizer.apply_chat_template(messages)
    wanted = beam_search([ids], dataclasses.replace(params, ignore_eos=False), engine=engine, progress=False)
    assert [choice["message"]["content"] for choice in chat["choices"]] == [a.text for a in wanted[0].choices]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_p": 0.5}, "top_p"),
        ({"stop": "x"}, "stop"),
        ({"temperature": 0.5}, "temperature"),
        ({"n": 11}, "n"),
        ({"n": 0}, "n"),
        ({"max_tokens": 500}, "max_tokens"),
        ({"early_stopping": "soon"}, "early_stopping"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
        ({"use_beam_search": None, "early_stopping": True}, "early_stopping"),
    ],
)
def test_what_a_search_can_not_honour_is_refused_by_name(client, fields, param):
    response = client.post("/v1/completions", json={"prompt": [5], "use_beam_search": True, **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
