"""One server for the clients of other people: a tiny random model whose template knows tools and says so.

The clients are in the extra ``clients`` (openai for node comes by npm); tests of one that is missing are skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers

from tests.serve.process import REAL, ServerProcess
from tests.serve.tiny_model import write_tiny_model

MAX_MODEL_LEN = 1024


def needs(package: str) -> pytest.MarkDecorator:
    """Skips tests where a client isn't installed. It is not imported for that: some take seconds, on every worker."""
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed: pip install 'jaxcb[clients]'")


TEMPLATE = (
    "{% if tools %}[tools]{% for tool in tools %}{{ tool.function.name }} {% endfor %}<tool_call>{% endif %}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
FLAGS = (
    f"--dtype float32 --max-model-len {MAX_MODEL_LEN} --max-num-seqs 8 --max-num-batched-tokens 128 --num-kv-pages 512 "
    "--served-model-name tiny --decode-buckets --mixed-buckets"
).split()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All on one worker, so that there is one server."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("clients"))


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, and its tokenizer as clients load it."""
    path = write_tiny_model(tmp_path_factory.mktemp("clients") / "tiny")
    (path / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": MAX_MODEL_LEN}), encoding="utf-8")
    tokenizer = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokenizer |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": MAX_MODEL_LEN}
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def no_blanks(model_dir: Path) -> dict[str, float]:
    """A logit_bias against white space, of which a random model would write one blank after the other into JSON."""
    tokenizer = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return {str(token): -100.0 for token in tokenizer.encode(" \n\r\t", add_special_tokens=False).ids}


@pytest.fixture(scope="session")
def server(model_dir: Path) -> Iterator[ServerProcess]:
    with ServerProcess(REAL, str(model_dir), *FLAGS) as server:
        yield server


@pytest.fixture(scope="session")
def quiet() -> dict[str, str]:
    """The environment of a client in a process of its own: nothing is fetched, nothing is reported home."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return {**os.environ, **offline, "OPENAI_API_KEY": "none", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
