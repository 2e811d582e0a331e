"""Prompts as the model sees them, with a tokenizer that adds tokens of its own: the template's ones stand alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from jaxcb.serve.app import make_app
from jaxcb.text import Tokenizer
from tests.text.small_tokenizers import TEMPLATE, byte_level_backend, with_bos_and_eos, write_dir

from .fake_engine import FakeEngine

MESSAGES = [{"role": "user", "content": "the text"}]


@pytest.fixture(params=[False, True], ids=["bos", "bos-and-eos"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_dir(tmp_path, with_bos_and_eos(byte_level_backend(), eos=request.param))


@pytest.fixture
def engine(path: Path) -> FakeEngine:
    engine = FakeEngine(answer="a", max_model_len=500)
    engine.tokenizer = Tokenizer.from_dir(path)  # type: ignore[assignment]  # the real one
    return engine


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[TestClient]:
    with TestClient(make_app(engine)) as client:
        yield client


def test_every_way_to_send_a_prompt_gives_transformers_ids(client: TestClient, engine: FakeEngine, path: Path) -> None:
    """vllm#2012: template and tokenizer both wrote the BOS token."""
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(path)
    chat = theirs.apply_chat_template(MESSAGES, tokenize=True, add_generation_prompt=True)["input_ids"]
    rendered = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    bos, eos = (theirs.convert_tokens_to_ids(token) for token in ("<s>", "</s>"))
    assert chat.count(bos) == 1 and eos not in chat

    def sent(endpoint: str, **body: object) -> list[int]:
        response = client.post(f"/v1/{endpoint}", json={"max_tokens": 1, **body})
        assert response.status_code == 200, response.text
        return list(engine.requests[-1].prompt_token_ids)

    assert sent("chat/completions", messages=MESSAGES) == chat
    assert sent("messages", messages=MESSAGES) == chat
    assert sent("responses", input="the text", max_tokens=None) == chat
    assert client.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"] == chat
    assert client.post("/apply_template", json={"messages": MESSAGES}).json()["prompt"] == rendered
    assert sent("completions", prompt="the text") == theirs("the text").input_ids
    assert client.post("/tokenize", json={"prompt": "the text"}).json()["tokens"] == theirs("the text").input_ids
    plain = client.post("/tokenize", json={"prompt": "the text", "add_special_tokens": False}).json()["tokens"]
    assert plain == theirs("the text", add_special_tokens=False).input_ids
    assert sent("completions", prompt=chat) == chat
    assert client.post("/detokenize", json={"tokens": chat}).json()["prompt"] == rendered


@pytest.mark.parametrize(
    "template", [None, "{{ raise_exception('no system') }}", "{% for %}", "{{ x.__class__ }}{{ 1 / 0 }}"]
)
def test_a_missing_or_raising_template_is_400(client: TestClient, engine: FakeEngine, template: str | None) -> None:
    engine.tokenizer.chat_template = template  # type: ignore[assignment]  # as a model has it
    for endpoint, body in (
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}),
        ("/v1/responses", {"input": "x"}),
        ("/tokenize", {"messages": MESSAGES}),
        ("/apply_template", {"messages": MESSAGES}),
    ):
        response = client.post(endpoint, json=body)
        assert response.status_code == 400, (endpoint, response.text)
        assert "template" in response.text and "Traceback" not in response.text
    assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def test_the_template_s_settings_go_through(client: TestClient, engine: FakeEngine) -> None:
    engine.tokenizer.chat_template = "{{ enable_thinking }}" + TEMPLATE
    body = {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False}}
    assert client.post("/apply_template", json=body).json()["prompt"].startswith("False")
    for kwargs in ({"messages": []}, {"tokenize": False}, {"date_string": "today"}):
        response = client.post("/v1/chat/completions", json={"messages": MESSAGES, "chat_template_kwargs": kwargs})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == f"chat_template_kwargs.{next(iter(kwargs))}"
