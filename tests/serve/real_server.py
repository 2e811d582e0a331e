"""The one real server that the tests of this room and of ``clients`` share: a tiny random model, whose template knows
tools and says so. Two servers would compile the same programs twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .tiny_model import write_tiny_model

LIMIT = 512
SEQS = 8
QUEUE = 64
PAGES = 256
FLAGS = (
    f"--dtype float32 --max-model-len {LIMIT} --max-num-seqs {SEQS} --max-num-batched-tokens 64 "
    f"--num-kv-pages {PAGES} --max-waiting {QUEUE} --served-model-name tiny --decode-buckets --mixed-buckets"
).split()
SHARED = pytest.mark.xdist_group("real_server")
"""All on one worker, so that there is one server."""
_TEMPLATE = (
    "{% if tools %}[tools]{% for tool in tools %}{{ tool.function.name }} {% endfor %}<tool_call>{% endif %}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_served_model(path: Path) -> Path:
    """The model, and its tokenizer as clients load it."""
    write_tiny_model(path)
    (path / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    for name, more in (
        ("config.json", {"max_position_embeddings": LIMIT}),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": LIMIT}),
    ):
        own = json.loads((path / name).read_text(encoding="utf-8"))
        (path / name).write_text(json.dumps(own | more), encoding="utf-8")
    return path
