"""A tiny random model that the benches can load, and one engine of each kind over it for the whole session."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.inprocess import InProcess
from jaxcb.config import EngineConfig
from tests.serve.tiny_model import write_tiny_model

# The same shapes everywhere, so that the program store has each program after the first test that needs it.
FLAGS = ("--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--max-model-len", "128")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with weights and a tokenizer."""
    return write_tiny_model(tmp_path_factory.mktemp("bench") / "tiny")


@pytest.fixture(scope="session")
def process(tiny: Path) -> InProcess:
    """Decode buckets of 1 and 2 rows, one mixed bucket of 16 tokens."""
    return InProcess.load(
        EngineConfig(
            model=str(tiny),
            dtype="float32",
            max_num_seqs=2,
            max_num_batched_tokens=16,
            max_model_len=128,
            enable_prefix_caching=False,
        )
    )
