"""The README's examples run as they stand there, with a small random model in the place of the built-in one."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path

import pytest

from jaxcb import generate as generate_module
from jaxcb.config import EngineConfig
from jaxcb.engine import Engine
from jaxcb.held_model import HeldModel
from jaxcb.text import Tokenizer
from jaxcb.weights import load
from tests.engine.conftest import SPEC, params  # noqa: F401  # a fixture
from tests.text.small_tokenizers import TEMPLATE, byte_level_backend

README = Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SMALL = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "max_model_len": 700,
    "num_kv_pages": 400,
    "decode_buckets": (),
    "mixed_buckets": (),
}
"""As in the tests of the engine, which share the compiled programs."""


def blocks() -> list[tuple[str, str]]:
    """(heading above it, code) of each example."""
    text = README.read_text(encoding="utf-8")
    found = []
    for match in BLOCK.finditer(text):
        heading = re.findall(r"^#+ (.*)$", text[: match.start()], re.MULTILINE)[-1]
        found.append((f"{heading} {len(found)}", match[1]))
    return found


@pytest.fixture(scope="module")
def small_engines(params):  # noqa: F811  # the fixture
    """Engine.start, over the small model where a config names no other."""
    tokenizer = Tokenizer(byte_level_backend(), {"bos_token": "<s>", "eos_token": "</s>"}, TEMPLATE)

    def start(config: EngineConfig | None = None, *, progress: bool = True) -> Engine:
        config = config or EngineConfig()
        held = config.model if isinstance(config.model, HeldModel) else HeldModel(SPEC, params, tokenizer)
        model = load(EngineConfig(model=held))
        changed = dataclasses.replace(config, **SMALL)
        spec = dataclasses.replace(model.spec, eos_token_ids=(1,), bos_token_id=0)
        engine = Engine(model.name, spec, model.params, model.tokenizer, changed)
        engine.asked_for = config
        engine.compile(progress=False)
        engine.run()
        return engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "start", start)
        yield
        generate_module._shut_down_shared()


@pytest.mark.parametrize(("name", "code"), blocks(), ids=[name for name, _ in blocks()])
def test_an_example_runs(name, code, small_engines, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if "lm_eval" in code and importlib.util.find_spec("lm_eval") is None:
        pytest.skip("lm-eval is an extra of its own")
    exec(compile(code, f"README.md: {name}", "exec"), {"__name__": "readme"})


def test_every_use_has_an_example():
    text = "".join(code for _, code in blocks())
    uses = ("generate(", "StructuredOutputs(", "LogitsProcessor(", "optax", "jaxcb.eval", ".embed(", ".score(", "beam_")
    assert [name for name in uses if name not in text] == []
