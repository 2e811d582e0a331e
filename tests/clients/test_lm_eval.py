"""lm-eval: local-completions scores and writes, local-chat-completions writes."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.serve.process import ServerProcess

from .conftest import needs

pytestmark = needs("lm_eval")


@pytest.fixture
def samples(said: dict[str, Any]) -> dict[str, Any]:
    """By kind of model and task."""
    assert "error" not in said["lm_eval"], said["lm_eval"]["error"]
    return said["lm_eval"]


def test_local_completions(server: ServerProcess, samples: dict[str, Any]) -> None:
    written, scored = samples["local-completions"]["jaxcb_write"], samples["local-completions"]["jaxcb_choose"]
    assert len(written) == len(scored) == 4
    assert all(isinstance(sample["resps"][0][0], str) for sample in written)
    with httpx.Client(base_url=server.url) as client:
        for sample in scored:
            for choice, [response] in zip(sample["doc"]["choices"], sample["resps"], strict=True):
                loglikelihood, greedy = response
                expected, likeliest = score(client, sample["doc"]["question"], f" {choice}")
                assert float(loglikelihood) == pytest.approx(expected, abs=1e-3)
                assert greedy == likeliest


def score(client: httpx.Client, context: str, continuation: str) -> tuple[float, bool]:
    """Log-likelihood of a text behind another, and whether it is the likeliest, by a call of our own."""
    body = {"prompt": context + continuation, "echo": True, "logprobs": 1, "max_tokens": 0}
    logprobs = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    start = len(context.encode())
    own = logprobs["token_logprobs"][start:]
    best = [max(top.values()) for top in logprobs["top_logprobs"][start:]]
    return sum(own), all(one >= other for one, other in zip(own, best, strict=True))


def test_local_chat_completions(samples: dict[str, Any]) -> None:
    written = samples["local-chat-completions"]["jaxcb_write"]
    assert len(written) == 4 and all(isinstance(sample["resps"][0][0], str) for sample in written)
