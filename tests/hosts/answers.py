"""One of two hosts of an engine over a mixture of experts, whose answers have the same bits in any company:
``python -m tests.hosts.answers RANK ADDRESS PARAMS``. The first writes a line of JSON with what it and an engine on one
device answer to all that decides an answer beside sampling."""

from __future__ import annotations

import json
import sys
from typing import Any

from jaxcb.beam import BeamParams
from jaxcb.config import EngineConfig
from jaxcb.engine import Engine
from jaxcb.generate import beam_search, generate
from jaxcb.hosts import follow, start
from jaxcb.request import RequestOutput, SamplingParams
from jaxcb.structured_outputs import StructuredOutputs
from tests.hosts.process import config_of
from tests.parallel.cut import MIXTURE, PROMPTS

WANTED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "several": {"n": 3, "temperature": 1.0, "seed": 9},
    "the best of several": {"n": 2, "best_of": 4, "temperature": 1.0, "seed": 3},
    "grammar": {"structured_outputs": StructuredOutputs(regex="[ab]{3}(cd|ef)*g{20}"), "ignore_eos": False},
    "choice": {"structured_outputs": StructuredOutputs(choice=["one way", "another way"]), "ignore_eos": False},
    "counted up": {"extra_args": {"count": True}, "temperature": 1.0, "seed": 2},
    "boosted": {"extra_args": {"boost": [7, 9]}},
    "stopped by an id": {"stop_token_ids": list(range(0, 256, 32)), "temperature": 1.0, "seed": 5},
}


LOGPROBS = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=3)
SETTINGS: dict[str, Any] = {"deterministic": True}


def summary(output: RequestOutput) -> list[Any]:
    choices = output.choices or (output,)
    return [[choice.token_ids, choice.text, str(choice.finish_reason), choice.stop_reason] for choice in choices]


def answers(engine: Engine, **fields: Any) -> list[Any]:
    sampling = SamplingParams(**({"max_tokens": 24, "temperature": 0, "ignore_eos": True} | fields))
    outputs = generate(PROMPTS[:4], sampling, engine=engine, progress=False)
    return [summary(output) for output in outputs]


def found_of(engine: Engine) -> dict[str, Any]:
    """By what was asked for."""
    found = {name: answers(engine, **fields) for name, fields in WANTED.items()}
    stop = found["greedy"][0][0][1][5:8]
    found["stopped by a string"] = answers(engine, stop=[stop], include_stop_str_in_output=True)
    beams = beam_search(PROMPTS[:2], BeamParams(width=3, max_tokens=8), engine=engine, progress=False)
    found["beams"] = [summary(output) for output in beams]
    among = generate(PROMPTS[:4], LOGPROBS, engine=engine, progress=False)[2]
    engine.reset_prefix_cache()
    [alone] = generate([PROMPTS[2]], LOGPROBS, engine=engine, progress=False)
    assert alone.logprobs is not None and among.logprobs is not None
    found["the same bits"] = alone.logprobs.logprobs.tolist() == among.logprobs.logprobs.tolist()
    return found


def lead(config: EngineConfig, file: str) -> None:
    engine = start(config, progress=False)
    with Engine.start(config_of(file, MIXTURE, **SETTINGS), progress=False) as whole:
        found = [found_of(whole), found_of(engine)]
    print(json.dumps({"found": found}), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    rank, address, file = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    shape = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "nnodes": 2, "node_rank": rank}
    config = config_of(file, MIXTURE, dist_init_addr=address, **shape, **SETTINGS)
    follow(config, progress=False) if rank else lead(config, file)
