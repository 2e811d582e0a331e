"""lm-eval: local-completions scores and writes, local-chat-completions writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.process import ServerProcess

from .conftest import MAX_MODEL_LEN, needs

pytestmark = needs("lm_eval")
TASKS = Path(__file__).parent / "lm_eval_task"
DATA = TASKS / "data.jsonl"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tasks, with the place of their data written in."""
    path = tmp_path_factory.mktemp("tasks")
    for file in TASKS.glob("*.yaml"):
        (path / file.name).write_text(file.read_text().replace("DATA", str(DATA)))
    return path


def evaluate(
    server: ServerProcess, model_dir: Path, environment: dict[str, str], tasks: Path, model: str, url: str, names: str
) -> list[dict[str, Any]]:
    """Run the command and return the samples that it logged."""
    out = tasks / model
    arguments = (
        f"model=tiny,base_url={server.url}{url},num_concurrent=4,max_length={MAX_MODEL_LEN},"
        f"tokenizer_backend=huggingface,tokenizer={model_dir}"
    )
    command = [sys.executable, "-m", "lm_eval", "--model", model, "--model_args", arguments, "--tasks", names]
    command += ["--include_path", str(tasks), "--output_path", str(out), "--log_samples"]
    if "chat" in model:
        command.append("--apply_chat_template")
    result = subprocess.run(
        command, env={**environment, "HF_HOME": str(tasks)}, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return [json.loads(line) for file in sorted(out.rglob("samples_*.jsonl")) for line in file.read_text().splitlines()]


def test_local_completions(server: ServerProcess, model_dir: Path, quiet: dict[str, str], tasks: Path) -> None:
    names = "jaxcb_choose,jaxcb_write"
    samples = evaluate(server, model_dir, quiet, tasks, "local-completions", "/v1/completions", names)
    assert len(samples) == 8
    scored = [sample for sample in samples if "acc" in sample]
    assert len(scored) == 4
    with httpx.Client(base_url=server.url) as client:
        for sample in scored:
            for choice, [response] in zip(sample["doc"]["choices"], sample["resps"], strict=True):
                loglikelihood, greedy = response
                expected, likeliest = score(client, sample["doc"]["question"], f" {choice}")
                assert float(loglikelihood) == pytest.approx(expected, abs=1e-3)
                assert (str(greedy) == "True") == likeliest


def score(client: httpx.Client, context: str, continuation: str) -> tuple[float, bool]:
    """Log-likelihood of a text behind another, and whether it is the likeliest, by a call of our own."""
    body = {"prompt": context + continuation, "echo": True, "logprobs": 1, "max_tokens": 0}
    logprobs = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    start = len(context.encode())
    own = logprobs["token_logprobs"][start:]
    best = [max(top.values()) for top in logprobs["top_logprobs"][start:]]
    return sum(own), all(one >= other for one, other in zip(own, best, strict=True))


def test_local_chat_completions(server: ServerProcess, model_dir: Path, quiet: dict[str, str], tasks: Path) -> None:
    samples = evaluate(server, model_dir, quiet, tasks, "local-chat-completions", "/v1/chat/completions", "jaxcb_write")
    assert len(samples) == 4 and all(isinstance(sample["resps"][0][0], str) for sample in samples)
