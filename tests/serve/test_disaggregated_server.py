"""Real servers whose prompts are computed apart from their answers: over HTTP they are the server that does both."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.hosts.run import free_address

from .process import REAL, ServerProcess
from .real_server import FLAGS, SHARED

ASKED = [
    {"prompt": [(7 * i * j + 3 * j) % 250 for j in range(60 + 40 * i)], "max_tokens": 12, "ignore_eos": True}
    | ({"temperature": 0} if i % 2 else {"temperature": 1, "seed": i, "n": 2})
    for i in range(6)
]

pytestmark = SHARED


def texts(url: str) -> list[list[str]]:
    """Answers to requests that come at once."""

    def ask(body: dict[str, Any]) -> list[str]:
        answer = httpx.post(f"{url}/v1/completions", json=body | {"model": "tiny"}, timeout=60)
        assert answer.status_code == 200, answer.text
        return [choice["text"] for choice in answer.json()["choices"]]

    with ThreadPoolExecutor(len(ASKED)) as pool:
        return list(pool.map(ask, ASKED))


def samples(url: str, name: str) -> dict[str, float]:
    """A metric by engine."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    found = [sample for family in families for sample in family.samples if sample.name == name]
    return {sample.labels["engine"]: sample.value for sample in found}


def health(url: str) -> Any:
    return httpx.get(f"{url}/health").json()


def eventually(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("count", "engines", "said"),
    [
        (1, {"decode", "prefill-0"}, "1 that answers, 1 that computes its prompts; what follows is of each"),
        pytest.param(
            2,
            {"0", "1", "prefill-0"},
            "2 behind one queue, 1 that computes its prompts; what follows is of each",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_server_of_several_engines_answers_as_one_and_shows_each(
    real_server: ServerProcess,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    engines: set[str],
    said: str,
):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", f"{1 + count}")
    with ServerProcess(REAL, str(model_dir), *FLAGS, "--disaggregate", f"prefill=1,decode={count}") as server:
        assert said in server.banner and "\n  KV cache     256 pages" in server.banner
        assert texts(server.url) == texts(real_server.url)
        assert health(server.url) == {"status": "ok", "engines": dict.fromkeys(engines, "ok")}
        assert samples(server.url, "jaxcb:engine_up") == dict.fromkeys(engines, 1)
        assert all(steps > 0 for steps in samples(server.url, "jaxcb:steps_total").values())
        assert not any(samples(server.url, "jaxcb:compiles_after_start_total").values())
        tokens = samples(server.url, "vllm:prompt_tokens_total")
        assert tokens.pop("prefill-0") == 0, "prompts are counted where the answers are made"
        assert sum(tokens.values()) == sum(len(body["prompt"]) * body.get("n", 1) for body in ASKED)


def test_servers_of_two_processes_answer_as_one_and_the_death_of_a_peer_is_shown(
    real_server: ServerProcess, model_dir: Path
):
    address = free_address()
    expected, listens = texts(real_server.url), ("--kv-role", "prefill", "--kv-listen", address)
    with (
        ServerProcess(REAL, str(model_dir), *FLAGS, *listens) as prefill,
        ServerProcess(REAL, str(model_dir), *FLAGS, "--kv-role", "decode", "--kv-peer", address) as decode,
    ):
        assert f"1 that answers, prompts are computed by {address}" in decode.banner
        peer = f"prefill at {address}"
        assert texts(decode.url) == expected
        assert samples(prefill.url, "jaxcb:steps_total")["0"] > 0
        assert health(decode.url) == {"status": "ok", "engines": {"decode": "ok", peer: "ok"}}
        prefill.process.kill()
        eventually(lambda: health(decode.url)["status"] == "degraded")
        assert health(decode.url)["engines"] == {"decode": "ok", peer: "lost"}
        assert samples(decode.url, "jaxcb:engine_up") == {"decode": 1, peer: 0}
        assert httpx.get(f"{decode.url}/ready").status_code == 200
        assert texts(decode.url) == expected
