"""Runs the clients that are commands, lm-eval, evalscope and llm, one after the other in this process: most of what
they cost is what they import, and much of that is the same.

    python -m tests.clients.in_one_process URL MODEL_DIR FOLDER

FOLDER holds tasks for lm-eval, and results go there. The last line is JSON: the name of a client that is installed ->
what it said, or {"error": ...}.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.serve.real_server import LIMIT


def lm_eval(url: str, model: str, folder: Path) -> Any:
    """Samples by kind of model and task."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    tasks = TaskManager(include_path=str(folder), include_defaults=False)
    arguments = f"model=tiny,num_concurrent=4,max_length={LIMIT},tokenizer_backend=huggingface,tokenizer={model}"
    samples = {}
    for kind, path, names in (
        ("local-completions", "/v1/completions", ["jaxcb_choose", "jaxcb_write"]),
        ("local-chat-completions", "/v1/chat/completions", ["jaxcb_write"]),
    ):
        result = simple_evaluate(
            model=kind,
            model_args=f"{arguments},base_url={url}{path}",
            tasks=names,
            task_manager=tasks,
            apply_chat_template="chat" in kind,
            bootstrap_iters=0,
            log_samples=True,
        )
        samples[kind] = {
            name: [{"doc": one["doc"], "resps": one["resps"]} for one in own] for name, own in result["samples"].items()
        }
    return samples


def evalscope(url: str, model: str, folder: Path) -> Any:
    """The summary of a load of random prompts, streamed."""
    from evalscope.cli.cli import run_cmd

    flags = (
        f"evalscope perf --model tiny --url {url}/v1/chat/completions --api openai --dataset random "
        f"--tokenizer-path {model} --min-prompt-length 64 --max-prompt-length 64 --min-tokens 8 --max-tokens 8 "
        f"-n 8 --parallel 4 --stream --no-test-connection --outputs-dir {folder / 'perf'}"
    )
    sys.argv = flags.split()
    run_cmd()
    [summary] = (folder / "perf").rglob("benchmark_summary.json")
    return json.loads(summary.read_text())


def llm(url: str, model: str, folder: Path) -> Any:
    """The answer to a prompt."""
    os.environ["LLM_USER_PATH"] = str(folder)
    models = f"- model_id: mine\n  model_name: tiny\n  api_base: {url}/v1\n"
    (folder / "extra-openai-models.yaml").write_text(models)
    from llm.cli import cli

    with contextlib.redirect_stdout(io.StringIO()) as out:
        cli.main(["-m", "mine", "-o", "max_tokens", "12", "-o", "temperature", "0", "hi"], standalone_mode=False)
    return out.getvalue()


def main(url: str, model: str, folder: str) -> None:
    said: dict[str, Any] = {}
    for client in (lm_eval, evalscope, llm):
        if importlib.util.find_spec(client.__name__) is not None:
            try:
                said[client.__name__] = client(url, model, Path(folder))
            except Exception:
                said[client.__name__] = {"error": traceback.format_exc()[-4000:]}
    print(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
