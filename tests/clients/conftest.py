"""The clients of other people, before the server that tests/serve tests too.

The clients are in the extra ``clients`` (openai for node comes by npm); tests of one that is missing are skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.serve.process import ROOT, ServerProcess
from tests.serve.real_server import SHARED

TASKS = Path(__file__).parent / "lm_eval_task"


def needs(package: str) -> pytest.MarkDecorator:
    """Skips tests where a client isn't installed. It is not imported for that: some take seconds, on every worker."""
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed: pip install 'jaxcb[clients]'")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(SHARED)


@pytest.fixture(scope="session")
def no_blanks(model_dir: Path) -> dict[str, float]:
    """A logit_bias against white space, of which a random model would write one blank after the other into JSON."""
    tokenizer = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return {str(token): -100.0 for token in tokenizer.encode(" \n\r\t", add_special_tokens=False).ids}


@pytest.fixture(scope="session")
def server(real_server: ServerProcess) -> ServerProcess:
    return real_server


@pytest.fixture(scope="session")
def quiet() -> dict[str, str]:
    """The environment of a client in a process of its own: nothing is fetched, nothing is reported home."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return {**os.environ, **offline, "OPENAI_API_KEY": "none", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}


@pytest.fixture(scope="session")
def said(
    server: ServerProcess, model_dir: Path, quiet: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What the clients said that are commands."""
    folder = tmp_path_factory.mktemp("said")
    for file in TASKS.glob("*.yaml"):
        (folder / file.name).write_text(file.read_text().replace("DATA", str(TASKS / "data.jsonl")))
    command = [sys.executable, "-m", f"{__package__}.in_one_process", server.url, str(model_dir), str(folder)]
    result = subprocess.run(
        command, env={**quiet, "HF_HOME": str(folder)}, capture_output=True, text=True, timeout=600, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])
