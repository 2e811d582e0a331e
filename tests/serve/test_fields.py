"""Every field of a body is honoured, harmless, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from jaxcb.request import SamplingParams
from jaxcb.serve.app import make_app
from jaxcb.serve.requests import CHAT_UNSUPPORTED, COMPLETION_UNSUPPORTED, SamplingFields

from .fake_engine import MAX_MODEL_LEN, FakeEngine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 2},
}
BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
UNSUPPORTED = [(CHAT, name, neutral) for name, neutral in CHAT_UNSUPPORTED.items()] + [
    (COMPLETIONS, name, neutral) for name, neutral in COMPLETION_UNSUPPORTED.items()
]


def refusal(client: TestClient, path: str, **fields: Any) -> dict[str, Any]:
    """The error of a request that must be refused with 400."""
    response = client.post(path, json={**BASE[path], **fields})
    assert response.status_code == 400, response.text
    return response.json()["error"]


@pytest.mark.parametrize(("path", "name", "neutral"), UNSUPPORTED)
def test_unsupported_fields_may_hold_their_neutral_values(
    client: TestClient, engine: FakeEngine, path: str, name: str, neutral: tuple[Any, ...]
) -> None:
    for value in (None, *neutral):
        response = client.post(path, json={**BASE[path], name: value})
        assert response.status_code == 200, response.text
    assert engine.requests[-1].sampling == SamplingParams(max_tokens=2)


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, name, _ in UNSUPPORTED])
def test_unsupported_fields_are_refused_by_name(client: TestClient, engine: FakeEngine, path: str, name: str) -> None:
    error = refusal(client, path, **{name: {"anything": "else"}})
    assert error["param"] == name
    assert f"{name} is not supported" in error["message"]
    assert not engine.requests


@BOTH
def test_what_is_left_out_is_the_model_s_default_and_what_is_sent_wins(path: str) -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_tokens": 40}
    engine = FakeEngine(sampling_defaults=defaults)
    with TestClient(make_app(engine)) as client:
        for sent in ({}, {"temperature": 0.0, "top_k": -1}, {"top_p": None, "max_tokens": 3}):
            body = {name: value for name, value in BASE[path].items() if name != "max_tokens"} | sent
            assert client.post(path, json=body).status_code == 200
            given = {name: value for name, value in sent.items() if value is not None}
            assert engine.requests[-1].sampling == SamplingParams(**{**defaults, **given})


@BOTH
def test_arguments_of_logits_processors_go_by_the_body_s_name(client: TestClient, path: str) -> None:
    error = refusal(client, path, vllm_xargs={"boost": 1})
    assert error["param"] == "vllm_xargs" and error["message"].startswith("vllm_xargs has no field 'boost'")


@BOTH
def test_the_model_s_default_of_max_tokens_leaves_room_at_the_context_limit(path: str) -> None:
    engine = FakeEngine(sampling_defaults={"max_tokens": 100_000})
    with TestClient(make_app(engine)) as client:
        body = {name: value for name, value in BASE[path].items() if name != "max_tokens"}
        assert client.post(path, json=body).status_code == 200
    request = engine.requests[-1]
    assert request.sampling.max_tokens == MAX_MODEL_LEN - len(request.prompt_token_ids)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"n": True}),
        (CHAT, {"echo": True}),
        (COMPLETIONS, {"suffix": ""}),
        (CHAT, {"tool_choice": "required"}),
    ],
)
def test_values_that_look_neutral_but_ask_for_something_are_refused(
    client: TestClient, path: str, fields: dict[str, Any]
) -> None:
    assert refusal(client, path, **fields)["param"] == next(iter(fields))


@BOTH
def test_harmless_fields_are_accepted(client: TestClient, path: str) -> None:
    harmless = {
        "user": "me",
        "metadata": {"run": "1"},
        "safety_identifier": "x",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "parallel_tool_calls": True,
    }
    assert client.post(path, json={**BASE[path], **harmless}).status_code == 200
    assert refusal(client, path, metadata="text")["param"] == "metadata"


@BOTH
@pytest.mark.parametrize("name", ["cache_prompt", "max_token", "Temperature"])
def test_unknown_fields_are_refused_by_name(client: TestClient, path: str, name: str) -> None:
    error = refusal(client, path, **{name: True})
    assert error["param"] == name
    assert error["message"] == f"unknown field {name}"


@BOTH
def test_sampling_fields_reach_the_engine(client: TestClient, engine: FakeEngine, path: str) -> None:
    fields = {
        "n": 2,
        "temperature": 0.5,
        "min_p": 0.1,
        "typical_p": 0.9,
        "top_n_sigma": 2.0,
        "repetition_penalty": 1.5,
        "presence_penalty": -1.0,
        "frequency_penalty": 0.5,
        "no_repeat_ngram_size": 3,
        "dry_multiplier": 0.8,
        "dry_base": 2.0,
        "dry_allowed_length": 3,
        "dry_sequence_breakers": ["."],
        "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
        "logit_bias": {"5": 1.0},
        "allowed_token_ids": [5, 6],
        "bad_words": ["no"],
        "top_p": 0.5,
        "top_k": 7,
        "seed": -3,
        "max_tokens": 5,
        "min_tokens": 1,
        "stop": ["x", "y"],
        "stop_token_ids": [1, 2],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    assert client.post(path, json={**BASE[path], **fields}).status_code == 200
    assert engine.requests[0].sampling == SamplingParams(**fields)


@BOTH
def test_scheduling_fields_reach_the_engine_or_are_refused(path: str) -> None:
    engine = FakeEngine(policy="priority")
    with TestClient(make_app(engine)) as client:
        body = {**BASE[path], "priority": -2, "cache_salt": "mine"}
        assert client.post(path, json=body).status_code == 200
    assert (engine.requests[0].priority, engine.requests[0].cache_salt) == (-2, "mine")
    with TestClient(make_app(FakeEngine())) as client:
        assert refusal(client, path, priority=1)["param"] == "priority"
        assert client.post(path, json={**BASE[path], "priority": 0, "cache_salt": "mine"}).status_code == 200
        assert refusal(client, path, cache_salt=5)["param"] == "cache_salt"


@BOTH
def test_null_is_the_same_as_leaving_out(client: TestClient, engine: FakeEngine, path: str) -> None:
    names = [*SamplingFields.__struct_fields__, "model", "stream", "stream_options", "user"]
    nulls = dict.fromkeys(names)
    body = {name: value for name, value in BASE[path].items() if name != "max_tokens"}
    for fields in (body, {**body, **nulls}):
        assert client.post(path, json=fields).status_code == 200
    assert engine.requests[0].sampling == engine.requests[1].sampling


@BOTH
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "1"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"no_repeat_ngram_size": 33}, "no_repeat_ngram_size"),
        ({"logprobs": 21}, "logprobs"),
        ({"seed": 10**30}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 100}, "stop"),
        ({"stop": [5]}, "stop[0]"),
        ({"stop": {}}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": ["1"]}, "stop_token_ids[0]"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"stream": "perhaps"}, "stream"),
        ({"model": 5}, "model"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"include_all": True}}, "stream_options.include_all"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
    ],
)
def test_wrong_values_are_refused_by_name(
    client: TestClient, engine: FakeEngine, path: str, fields: dict[str, Any], param: str
) -> None:
    error = refusal(client, path, **fields)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert not engine.requests


def test_messages_do_not_come_back_at_full_length(client: TestClient) -> None:
    for fields in ({"x" * 100_000: 1}, {"suffix": "x" * 100_000}, {"stop": ["x" * 100_000, ""]}):
        assert len(json.dumps(refusal(client, COMPLETIONS, **fields))) < 2000
