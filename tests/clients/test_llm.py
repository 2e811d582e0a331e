"""The llm command, with a model of our own in extra-openai-models.yaml."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx

from tests.serve.process import ServerProcess

from .conftest import needs

pytestmark = needs("llm")


def test_a_prompt_is_answered(server: ServerProcess, quiet: dict[str, str], tmp_path: Path) -> None:
    models = f"- model_id: mine\n  model_name: tiny\n  api_base: {server.url}/v1\n"
    (tmp_path / "extra-openai-models.yaml").write_text(models)
    command = [sys.executable, "-m", "llm", "-m", "mine", "-o", "max_tokens", "12", "-o", "temperature", "0", "hi"]
    answer = subprocess.run(
        command,
        env={**quiet, "LLM_USER_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "temperature": 0}
    expected = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    assert answer.strip() == expected["choices"][0]["message"]["content"].strip() != ""
