"""A small random model with room for long prompts, and engines over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax.numpy as jnp
import pytest

from jaxcb.config import EngineConfig
from jaxcb.engine import Engine
from jaxcb.models import ModelSpec
from jaxcb.models.decoder import Params, init_params
from jaxcb.text import Tokenizer
from tests.text.small_tokenizers import byte_level

SPEC = ModelSpec(
    family="llama",
    vocab_size=264,
    hidden_size=48,
    intermediate_size=96,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    max_position=1024,
    tie_word_embeddings=True,
)

MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="session")
def params() -> Params:
    params = init_params(SPEC, jnp.float32, seed=3)
    # Embeddings of size one, not 0.02: the two best logits are then far enough apart for float32.
    params["embed"]["embedding"] = params["embed"]["embedding"] * 50
    return params


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_level()


@pytest.fixture
def make_engine(params: Params, tokenizer: Tokenizer) -> Iterator[MakeEngine]:
    """Engines over the small model, with few buckets so that they compile fast; shut down after the test."""
    engines: list[Engine] = []

    def make(**changes: object) -> Engine:
        values = {
            "dtype": "float32",
            "max_num_seqs": 8,
            "max_num_batched_tokens": 128,
            "max_model_len": 700,
            "num_kv_pages": 400,
            "decode_buckets": (),
            "mixed_buckets": (),
        } | changes
        engine = Engine("small", SPEC, params, tokenizer, EngineConfig(**values))
        engine.compile(progress=False)
        engine.run()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.shutdown()
