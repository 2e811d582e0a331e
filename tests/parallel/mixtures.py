"""Mixtures of experts that are shared out whole over two devices, in all that can be done with several: what they
answer, beside one device. ``alone DIR ...`` or ``together``; the directories are of models whose files are loaded."""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import numpy as np

from jaxcb.cluster import start
from jaxcb.config import EngineConfig
from jaxcb.devices import placement_of
from jaxcb.disagg import roles
from jaxcb.disagg.start import start_pairs
from jaxcb.engine import Engine, ServingEngine
from jaxcb.engine.incoming import Incoming
from jaxcb.generate import generate
from jaxcb.held_model import HeldModel
from jaxcb.models.decoder import Params
from jaxcb.request import SamplingParams
from jaxcb.weights.loader import load_params
from jaxcb.weights.placed import placed
from jaxcb.weights.resolve import resolve
from tests.engine.conftest import sensitive_params
from tests.parallel.cut import LIMITS, MIXTURE, PROMPTS
from tests.text.small_tokenizers import byte_level

GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)


def config_of(size: int, **changes: Any) -> EngineConfig:
    model = HeldModel(MIXTURE, sensitive_params(MIXTURE, seed=3), byte_level())
    values = LIMITS | {"tensor_parallel_size": size, "enable_expert_parallel": size > 1} | changes
    return EngineConfig(model=model, backend="xla", **values)


def answers(engine: ServingEngine, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [list(output.token_ids) for output in generate(prompts, GREEDY, engine=engine, progress=False)]


def others() -> Params:
    """Weights of the same shapes."""
    return sensitive_params(MIXTURE, seed=4)


def alone(size: int) -> dict[str, Any]:
    """Of one engine, before and after its weights were replaced."""
    with Engine.start(config_of(size), progress=False) as engine:
        found: dict[str, Any] = {"tokens": answers(engine), "swaps": engine.stats().swaps}
        engine.update_params(others())
        return found | {"others": answers(engine, PROMPTS[:3])}


def behind_one_queue() -> dict[str, Any]:
    """Of two engines of two devices each."""
    with start(config_of(2, data_parallel_size=2), progress=False) as replicas:
        found: dict[str, Any] = {"tokens": answers(replicas)}
        found["ended"] = [sum(stats.finished.values()) for stats in replicas.stats_by_engine().values()]
        replicas.update_params(others())
        return found | {"others": answers(replicas, PROMPTS[:3])}


def apart() -> dict[str, Any]:
    """Of two devices that compute prompts, and two that generate."""
    roles.takes_prompts = lambda **load: False
    Incoming.take_back = lambda *arguments: None  # type: ignore[method-assign]  # as in tests.disagg
    [front] = start_pairs(config_of(2), num_prefill=1, num_decode=1, progress=False)
    with front:
        found: dict[str, Any] = {"tokens": answers(front)}
        found["handed over"] = front.decode.handovers.incoming.totals.requests
        front.update_params(others())
        return found | {"others": answers(front, PROMPTS[:3])}


def of_files(model: str) -> list[bool]:
    """Whether what two and four devices are given of a model's files is what they would be of its whole parameters."""
    files = resolve(model)
    spec = files.read_spec()
    whole = load_params(files, spec, np.dtype("float32"))
    same = []
    for size in (2, 4):
        placement = placement_of(None, size, expert_parallel=True)
        parts = load_params(files, spec, np.dtype("float32"), placement=placement)
        assert parts["layers"][0]["down"]["kernel"].shape[:2] == (size, spec.num_experts // size)
        same += jax.tree.leaves(jax.tree.map(np.array_equal, parts, placed(whole, spec, placement)))
    return same


if __name__ == "__main__":
    match sys.argv[1:]:
        case "alone", *models:
            print(json.dumps([alone(1), alone(2), *map(of_files, models)]))
        case _:
            print(json.dumps([behind_one_queue(), apart()]))
