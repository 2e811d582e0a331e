"""Engines that are each cut over two of four devices, behind one queue and one handing its prompts to the other: what
they answer, and where their weights lie."""

from __future__ import annotations

import json
from typing import Any

import jax

from jaxcb.cluster import Replicas, start
from jaxcb.disagg import roles
from jaxcb.disagg.start import start_pairs
from jaxcb.engine import Engine, ServingEngine
from jaxcb.engine.incoming import Incoming
from jaxcb.generate import generate
from tests.parallel.cut import PROMPTS, SAMPLING, held_config


def answers(engine: ServingEngine) -> list[list[int]]:
    outputs = generate(PROMPTS, SAMPLING, engine=engine, progress=False)
    return [list(output.token_ids) for output in outputs]


def places(*engines: Engine) -> list[list[int]]:
    """Devices on which the weights of each lie."""
    return [sorted({d.id for leaf in jax.tree.leaves(engine.params) for d in leaf.devices()}) for engine in engines]


def main() -> None:
    roles.takes_prompts = lambda **load: False
    Incoming.take_back = lambda *arguments: None  # type: ignore[method-assign]  # as in tests.disagg
    found: dict[str, Any] = {}
    with Engine.start(held_config(1), progress=False) as whole:
        found["whole"] = answers(whole)
    with start(held_config(2, data_parallel_size=2), progress=False) as replicas:
        assert isinstance(replicas, Replicas)
        found["replicas"] = answers(replicas), places(*replicas.engines)
        found["ended"] = [sum(stats.finished.values()) for stats in replicas.stats_by_engine().values()]
    [front] = start_pairs(held_config(2), num_prefill=1, num_decode=1, progress=False)
    with front:
        found["apart"] = answers(front), places(*front.prefill, front.decode)
        found["handed over"] = front.decode.handovers.incoming.totals.requests
    print(json.dumps(found))


if __name__ == "__main__":
    main()
