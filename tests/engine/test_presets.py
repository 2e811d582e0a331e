"""A preset changes when tokens are computed, never which."""

import pytest

from jaxcb.config import EngineConfig
from jaxcb.engine.core import EngineCore
from jaxcb.engine.sizing import limits_of
from jaxcb.presets import PRESETS
from jaxcb.request import Request, SamplingParams
from jaxcb.scheduler import Scheduler
from tests.engine.conftest import SPEC
from tests.sim.record import Machine

SIZES = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "max_model_len": 256,
    "num_kv_pages": 64,
    "page_size": 16,
    "decode_buckets": (),
    "mixed_buckets": (),
}
PROMPTS = [[(7 * n + i * i) % SPEC.vocab_size for i in range(30 + 40 * (n % 4))] for n in range(9)]


@pytest.fixture(scope="module")
def machine(params):
    return Machine(SPEC, params, EngineConfig(**SIZES))


def answers(machine, config):
    """Of all prompts, on the same compiled programs."""
    core = EngineCore(Scheduler(limits_of(machine.config_of(config), SPEC)), machine.runner, run_ahead=config.run_ahead)
    tokens = {}
    for number, prompt in enumerate(PROMPTS):
        sampling = SamplingParams(temperature=0.0, max_tokens=6 + 5 * (number % 3), ignore_eos=True)
        core.add(Request(request_id=str(number), prompt_token_ids=prompt, sampling=sampling))
    while core.has_work:
        for event in core.step():
            tokens.setdefault(event.sequence.request.request_id, []).append(event.token_id)
    core.scheduler.check()
    return tokens


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.pools is None])
def test_every_preset_of_one_engine_serves_and_answers_alike(machine, name):
    default = answers(machine, EngineConfig(**SIZES))
    assert len(default) == len(PROMPTS)
    assert answers(machine, EngineConfig.preset(name, **SIZES)) == default
