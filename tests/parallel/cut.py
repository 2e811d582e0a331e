"""Engines over one model on one device and cut over four: what each answers, and what else they do.

Two KV heads: of four devices two have each. 265 ids, which four doesn't divide. Every part that a layer can
have: biases, norms of queries and keys, a window.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxcb.config import EngineConfig
from jaxcb.devices import placement_of
from jaxcb.engine import Engine
from jaxcb.held_model import HeldModel
from jaxcb.models.params import Params
from jaxcb.request import RequestOutput, SamplingParams
from jaxcb.structured_outputs import StructuredOutputs
from jaxcb.weights.held import no_tokenizer
from jaxcb.weights.loader import load_params
from jaxcb.weights.resolve import resolve
from tests.engine.conftest import SPEC, sensitive_params
from tests.engine.run import complete
from tests.text.small_tokenizers import byte_level

CUT = dataclasses.replace(
    SPEC,
    num_heads=8,
    intermediate_size=64,
    vocab_size=265,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    qk_norm=True,
    windows=(None, 20),
)
MIXTURE = dataclasses.replace(
    SPEC, family="mixtral", num_heads=8, intermediate_size=48, vocab_size=265, num_experts=8, num_experts_per_token=3
)
LIMITS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 300,
    "num_kv_pages": 24,
    "decode_buckets": (),
    "mixed_buckets": (),
    "kv_transfer": True,
    "host_kv_gib": 0.01,
    "preemption": "swap",
    "admission_watermark": 0.0,
}
FEW: dict[str, Any] = {"kv_transfer": False, "host_kv_gib": 0.0, "preemption": "recompute"}
PROMPTS = [np.random.default_rng(length).integers(2, 256, length).tolist() for length in (3, 50, 200, 17, 130, 90)]
SAMPLING = [
    SamplingParams(max_tokens=40, temperature=0, logprobs=2),
    SamplingParams(max_tokens=40, temperature=1, seed=4, presence_penalty=0.3, logprobs=3, prompt_logprobs=2),
    SamplingParams(max_tokens=60, temperature=1, seed=5, top_p=0.9, min_tokens=3),
    SamplingParams(max_tokens=30, temperature=1, seed=6, structured_outputs=StructuredOutputs(regex="[a-f]+")),
    SamplingParams(max_tokens=60, temperature=0),
    SamplingParams(max_tokens=60, temperature=0.7, seed=7, logit_bias={3: 2.0}),
]


def params() -> Params:
    values, rng = sensitive_params(CUT, seed=3), np.random.default_rng(0)
    for layer in values["layers"].values():
        for part in ("qkv", "o", "gate_up", "down"):
            bias = layer[part]["bias"]
            layer[part]["bias"] = jnp.asarray(rng.normal(size=bias.shape) * 0.3, bias.dtype)
    return values


def logprobs_of(outputs: list[RequestOutput]) -> list[float]:
    parts = [*(output.logprobs for output in outputs[:2]), outputs[1].prompt_logprobs]
    return np.concatenate([part.logprobs for part in parts if part is not None]).tolist()


def sums_of(engine: Engine) -> list[int]:
    """All-reduces of each forward."""
    programs = [program.as_text() or "" for program in engine._runner._forward.values()]
    return [len(re.findall(r" all-reduce(?:-start)?\(", text)) for text in programs]


def found_of(engine: Engine, other: Engine) -> dict[str, Any]:
    """What an engine answers, and whether it goes on to do so after all that can happen to it. ``other`` is given the
    KV of a prompt by it, and gives it back."""
    outputs = complete(engine, PROMPTS, SAMPLING)
    tokens = [output.token_ids for output in outputs]

    def same() -> bool:
        return [output.token_ids for output in complete(engine, PROMPTS, SAMPLING)] == tokens

    complete(engine, [PROMPTS[2]], SAMPLING[4])
    handed_over = other.handovers.import_prefix(engine.handovers.export_prefix(PROMPTS[2], ""), "")
    engine.reset_prefix_cache()
    handed_back = engine.handovers.import_prefix(other.handovers.export_prefix(PROMPTS[2]))
    found = {
        "sums": sums_of(engine),
        "tokens": tokens,
        "logprobs": logprobs_of(outputs),
        "embedding": engine.embed(PROMPTS[:2], pooling="mean").tolist(),
        "handed": [handed_over, handed_back],
        "swaps": engine.stats().swaps,
        "same with pages of the other": same(),
    }
    held = params()
    engine.update_params({**held, "final_norm": {"scale": -held["final_norm"]["scale"]}})
    found["other with other weights"] = not same()
    engine.update_params(held)
    engine.sleep()
    engine.wake()
    return found | {"same after sleep": same(), "compiles": engine.stats().compiles}


def held_config(size: int, **changes: Any) -> EngineConfig:
    model = HeldModel(CUT, params(), byte_level())
    return EngineConfig(model=model, backend="xla", tensor_parallel_size=size, **(LIMITS | changes))


def answers() -> list[dict[str, Any]]:
    with Engine.start(held_config(1), progress=False) as whole:
        found = [found_of(whole, whole)]
        whole.reset_prefix_cache()
        with Engine.start(held_config(4), progress=False) as engine:
            found.append(found_of(engine, whole))
    return found


def same_bits() -> list[bool]:
    """Whether a request's log-probabilities are the same bits alone and among others, on four devices."""
    with Engine.start(held_config(4, deterministic=True), progress=False) as engine:
        together = complete(engine, PROMPTS, SAMPLING)
        engine.reset_prefix_cache()
        alone = [complete(engine, [PROMPTS[i]], SAMPLING[i])[0] for i in range(2)]
    pairs = zip(alone, together, strict=False)
    return [
        one.token_ids == other.token_ids
        and one.logprobs is not None
        and other.logprobs is not None
        and np.array_equal(one.logprobs.top_logprobs, other.logprobs.top_logprobs)
        for one, other in pairs
    ]


def experts() -> list[dict[str, Any]]:
    """What a mixture of experts answers on one device, cut over two and four, and with whole experts on them."""
    held = HeldModel(MIXTURE, sensitive_params(MIXTURE, seed=3), byte_level())
    found = []
    for size, whole in ((1, False), (2, False), (2, True), (4, True)):
        config = EngineConfig(
            model=held, backend="xla", tensor_parallel_size=size, enable_expert_parallel=whole, **(LIMITS | FEW)
        )
        with Engine.start(config, progress=False) as engine:
            sampling = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, logprobs=1)
            outputs = complete(engine, PROMPTS[:4], sampling)
            layer = engine._runner.params["layers"][0]
            found.append(
                {
                    "sums": sums_of(engine),
                    "tokens": [output.token_ids for output in outputs],
                    "logprobs": [output.logprobs.logprobs.tolist() for output in outputs if output.logprobs],
                    "shapes": [list(layer[part]["kernel"].shape) for part in ("router", "gate_up", "down")],
                }
            )
    return found


def from_files(*models: str) -> list[list[list[int]]]:
    """Greedy answers of the same model, once from each kind of file on two devices, and first on one."""
    found, limits = [], LIMITS | {"max_model_len": 100}
    for size, model in ((1, models[0]), *((2, model) for model in models)):
        files, config = resolve(model), EngineConfig(backend="xla", tensor_parallel_size=size, **limits)
        spec = files.read_spec()
        read = load_params(files, spec, np.dtype("float32"), placement=placement_of(None, size))
        engine = Engine("tiny", spec, read, no_tokenizer(spec), config)
        engine.compile(progress=False)
        engine.run()
        outputs = complete(engine, PROMPTS[:2], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
        found.append([output.token_ids for output in outputs])
        engine.shutdown()
    return found


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    match what:
        case "answers":
            print(json.dumps(answers()))
        case "experts":
            print(json.dumps(experts()))
        case "bits":
            print(json.dumps(same_bits()))
        case "files":
            print(json.dumps(from_files(*arguments)))
