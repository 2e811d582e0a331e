"""A small random model with room for long prompts, and engines over it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import pytest

from jaxcb.config import Backend, EngineConfig
from jaxcb.engine import Engine
from jaxcb.models import ModelSpec
from jaxcb.models.decoder import init_params
from jaxcb.models.params import Params
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
)

MakeEngine = Callable[..., Engine]


def sensitive_params(spec: ModelSpec, seed: int) -> Params:
    """Random weights whose answers wander: every token of the context changes what comes next.

    With tied embeddings, or ones much larger than what the layers add, such a model repeats its last token for ever,
    and no test of equal answers could fail.
    """
    params = init_params(spec, jnp.float32, seed=seed)
    params["embed"]["embedding"] = params["embed"]["embedding"] * 20
    params["lm_head"]["kernel"] = params["lm_head"]["kernel"] * 50
    return params


@pytest.fixture(scope="session")
def params() -> Params:
    return sensitive_params(SPEC, seed=3)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_level()


@pytest.fixture(scope="session")
def backend() -> Backend | None:
    """None: what the machine takes. Tests that cross backends override it."""
    return None


@contextlib.contextmanager
def engines_over(params: Params, tokenizer: Tokenizer, backend: Backend | None) -> Iterator[MakeEngine]:
    """Engines over the small model, with few buckets so that they compile fast; shut down at the end."""
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
            "backend": backend,
        } | changes
        engine = Engine("small", SPEC, params, tokenizer, EngineConfig(**values))
        engine.compile(progress=False)
        engine.run()
        engines.append(engine)
        return engine

    make.forget = engines.clear  # type: ignore[attr-defined]  # for tests that look at who keeps an engine alive
    yield make
    for engine in engines:
        engine.shutdown()


@pytest.fixture
def make_engine(params: Params, tokenizer: Tokenizer, backend: Backend | None) -> Iterator[MakeEngine]:
    with engines_over(params, tokenizer, backend) as make:
        yield make


@pytest.fixture(scope="module")
def make_engines(params: Params, tokenizer: Tokenizer, backend: Backend | None) -> Iterator[MakeEngine]:
    """Engines that the tests of a module share: one for each set of changes."""
    with engines_over(params, tokenizer, backend) as make:
        known: dict[tuple[tuple[str, object], ...], Engine] = {}

        def shared(**changes: object) -> Engine:
            key = tuple(sorted(changes.items()))
            if key not in known:
                known[key] = make(**changes)
            return known[key]

        yield shared
