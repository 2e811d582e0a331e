"""One of two hosts of an engine, with two devices: ``python -m tests.hosts.process RANK ADDRESS PARAMS``.

The first writes a line of JSON with what it and an engine on one device answer.
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxcb.beam import BeamParams
from jaxcb.config import EngineConfig
from jaxcb.engine import Engine
from jaxcb.errors import ConfigError
from jaxcb.generate import beam_search
from jaxcb.held_model import HeldModel
from jaxcb.hosts import follow, start
from jaxcb.models import ModelSpec
from jaxcb.request import Request, SamplingParams
from tests.engine.run import complete
from tests.engine.test_logits_processors import PROCESSORS
from tests.parallel.cut import CUT, LIMITS, PROMPTS, SAMPLING, logprobs_of
from tests.text.small_tokenizers import byte_level


def save(params: dict[str, Any], file: Path) -> None:
    file.write_bytes(pickle.dumps(jax.tree.map(np.asarray, params)))


def config_of(file: str, spec: ModelSpec = CUT, **changes: Any) -> EngineConfig:
    """Parameters are numpy's: jax isn't started before the hosts have met."""
    params = pickle.loads(Path(file).read_bytes())
    settings = LIMITS | {"backend": "xla", "kv_transfer": False, "logits_processors": PROCESSORS} | changes
    return EngineConfig(model=HeldModel(spec, params, byte_level()), **settings)


def found_of(engine: Engine) -> dict[str, Any]:
    """What an engine answers, again from its prefix cache, and again after its pages were given back."""
    outputs = complete(engine, PROMPTS, SAMPLING)
    tokens = [output.token_ids for output in outputs]
    aborted = engine.submit(Request(request_id="a", prompt_token_ids=PROMPTS[3], sampling=SAMPLING[4]))
    next(iter(aborted))
    aborted.abort()
    several = SamplingParams(n=2, max_tokens=20, temperature=1, seed=9)
    streams = engine.submit_choices(Request(request_id="n", prompt_token_ids=PROMPTS[1], sampling=several))
    choices = [list(stream)[-1].token_ids for stream in streams]
    stop = outputs[4].text[4:6]
    stopped = complete(engine, [PROMPTS[4]], SamplingParams(max_tokens=60, temperature=0, stop=[stop]))[0]
    asked = [
        SamplingParams(max_tokens=20, temperature=0, extra_args=extra) for extra in ({"count": True}, {"boost": [7, 9]})
    ]
    beams = beam_search(PROMPTS[:2], BeamParams(width=3, max_tokens=8), engine=engine, progress=False)
    again = complete(engine, PROMPTS[:3], SAMPLING[:3])
    found = {
        "tokens": tokens,
        "logprobs": logprobs_of(outputs),
        "choices": choices,
        "stopped": [stopped.text, stopped.stop_reason, str(stopped.finish_reason)],
        "processed": [output.token_ids for output in complete(engine, PROMPTS[:2], asked)],
        "beams": [[choice.token_ids for choice in output.choices or ()] for output in beams],
        "embedding": engine.embed(PROMPTS[:2], pooling="mean").tolist(),
        "scores": [score.logprob for score in engine.score([(PROMPTS[0], PROMPTS[2]), (PROMPTS[1], PROMPTS[4])])],
        "cached": sum(output.num_cached_tokens for output in again),
        "same again": [output.token_ids for output in again] == tokens[:3],
        "swaps": engine.stats().swaps,
    }
    engine.sleep()
    engine.wake()
    awake = complete(engine, PROMPTS[:2], SAMPLING[:2])
    found["same after sleep"] = [output.token_ids for output in awake] == tokens[:2]
    return found | {"compiles": engine.stats().compiles}


def refusal_of(engine: Engine) -> str:
    try:
        engine.update_params({})
    except ConfigError as error:
        return str(error)
    return ""


def lead(config: EngineConfig, file: str) -> None:
    engine = start(config, progress=False)
    with Engine.start(config_of(file), progress=False) as whole:
        found = [found_of(whole), found_of(engine)]
    print(json.dumps({"found": found, "update_params": refusal_of(engine)}), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    rank, address, file = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    config = config_of(file, tensor_parallel_size=4, nnodes=2, node_rank=rank, dist_init_addr=address)
    follow(config, progress=False) if rank else lead(config, file)
