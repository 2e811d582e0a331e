"""The engine of ``test_sampling.py`` in a process of its own, which prints its answers."""

from __future__ import annotations

import json
from typing import Any

from jaxcb.engine import Engine
from jaxcb.generate import generate
from jaxcb.request import SamplingParams
from tests.engine.conftest import SPEC, engines_over, sensitive_params
from tests.text.small_tokenizers import byte_level

JOBS: list[tuple[list[int], dict[str, Any]]] = [
    ([5, 6, 7], {"seed": 1}),
    ([7, 6, 5, 4, 3] * 9, {"seed": 2, "top_p": 0.8, "top_k": 40, "temperature": 0.7}),
    ([11], {"seed": -3, "n": 3, "repetition_penalty": 1.2}),
    (list(range(20, 60)), {"seed": 2**63 - 1, "xtc_probability": 0.5, "xtc_threshold": 0.01}),
]
"""Of each tier that draws one, and one of several answers."""


def answers_of(engine: Engine, jobs: list[tuple[list[int], dict[str, Any]]]) -> list[list[list[int]]]:
    """Token ids of every answer to every prompt."""
    sampling = [SamplingParams(max_tokens=16, ignore_eos=True, **kind) for _, kind in jobs]
    outputs = generate([prompt for prompt, _ in jobs], sampling, engine=engine, progress=False)
    return [[list(choice.token_ids) for choice in output.choices] for output in outputs]


if __name__ == "__main__":
    with engines_over(sensitive_params(SPEC, seed=3), byte_level(), None) as make:
        one = make(max_num_seqs=8)
        print(json.dumps([answers_of(one, [job])[0] for job in JOBS]))
