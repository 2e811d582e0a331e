"""deterministic=True on the GPU that is there: `pytest tests/gpu`. Why it must hold is said in jaxcb/README.md."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from jaxcb.config import EngineConfig
from jaxcb.engine import Engine
from tests.engine.conftest import SPEC, sensitive_params
from tests.engine.test_deterministic import ALONE, NUM_REQUESTS, TIGHT, TOGETHER, in_dtype, run
from tests.text.small_tokenizers import byte_level

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="jax finds no GPU"),
]
SMALL: dict[str, Any] = {"num_kv_pages": 400, "decode_buckets": (), "mixed_buckets": ()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bits_are_those_of_the_request_alone(dtype):
    params = in_dtype(sensitive_params(SPEC, 3), dtype)

    def answers(one_by_one: bool = False, **changes: Any) -> tuple[dict[int, Any], Any]:
        config = EngineConfig(**SMALL | {"dtype": dtype} | changes)
        with Engine("small", SPEC, params, byte_level(), config) as engine:
            engine.compile(progress=False)
            engine.run()
            waves = [[i] for i in range(NUM_REQUESTS)] if one_by_one else [range(NUM_REQUESTS)]
            found: dict[int, Any] = {}
            for wave in waves:
                found |= run(engine, wave)
            return found, engine.stats()

    alone, _ = answers(one_by_one=True, **ALONE)
    assert answers(**TOGETHER | {"decode_buckets": (8,)})[0] == alone
    for changes in (
        {"preemption": "recompute", "max_chunk_tokens": 17, "enable_prefix_caching": False},
        {"preemption": "swap"},
    ):
        found, stats = answers(**TIGHT, **changes)
        assert found == alone
        assert stats.preemptions > 0 and (stats.swaps > 0) == (changes["preemption"] == "swap")
