"""Engines on devices of their own, in one process and at the same time: what each answers, and where its arrays lie."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import jax

from jaxcb.config import EngineConfig
from jaxcb.engine import Engine
from jaxcb.request import SamplingParams
from tests.engine.conftest import SPEC, sensitive_params
from tests.engine.run import complete

PROMPTS = [list(range(5)), list(range(7, 60)), list(range(100, 250))]
CONFIG = EngineConfig(
    model=(SPEC, sensitive_params(SPEC, seed=3)),
    dtype="float32",
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_model_len=400,
    num_kv_pages=100,
    decode_buckets=(),
    mixed_buckets=(),
    kv_transfer=True,
)


def answers(engine: Engine) -> list[list[int]]:
    sampling = [SamplingParams(max_tokens=24, temperature=t, seed=1, presence_penalty=t / 2) for t in (0.0, 0.8, 0.0)]
    return [output.token_ids for output in complete(engine, PROMPTS, sampling)]


def places(engine: Engine) -> list[int]:
    arrays = (engine._runner.params, engine._runner._kv, engine._runner._state)
    return sorted({device.id for array in jax.tree.leaves(arrays) for device in array.devices()})


def main() -> None:
    engines = [Engine.start(CONFIG, devices=[device], progress=False) for device in jax.devices()]
    with ThreadPoolExecutor() as threads:
        found = list(threads.map(answers, engines))
    handed_over = engines[1].handovers.import_prefix(engines[0].handovers.export_prefix(PROMPTS[2], "salt"), "salt")
    engines[1].reset_prefix_cache()
    handed_over += engines[1].handovers.import_prefix(engines[0].handovers.export_prefix(PROMPTS[2]))
    found.append(answers(engines[1]))
    print(json.dumps({"answers": found, "places": [places(engine) for engine in engines], "handed_over": handed_over}))
    for engine in engines:
        engine.shutdown()


if __name__ == "__main__":
    main()
