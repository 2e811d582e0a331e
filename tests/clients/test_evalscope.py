"""evalscope perf: a load of random prompts, streamed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.serve.process import ServerProcess

from .conftest import needs

pytestmark = needs("evalscope")


def test_every_request_of_a_load_is_answered(
    server: ServerProcess, model_dir: Path, quiet: dict[str, str], tmp_path: Path
) -> None:
    flags = (
        f"perf --model tiny --url {server.url}/v1/chat/completions --api openai --dataset random "
        f"--tokenizer-path {model_dir} --min-prompt-length 64 --max-prompt-length 64 --min-tokens 8 --max-tokens 8 "
        f"-n 8 --parallel 4 --stream --no-test-connection --outputs-dir {tmp_path}"
    )
    result = subprocess.run(
        [sys.executable, "-m", "evalscope.cli.cli", *flags.split()],
        env=quiet,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    [summary] = tmp_path.rglob("benchmark_summary.json")
    said = json.loads(summary.read_text())
    assert (said["Success Requests"], said["Failed Requests"], said["Avg Output Tokens"]) == (8, 0, 8)
