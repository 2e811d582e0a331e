"""Records the step logs that the simulator is held against: ``python -m tests.sim.record FOLDER``.

Runs the built-in model on this machine, so it needs the model and some minutes; the tests read what it wrote. The runs
take turns and are repeated, and the time of a step is the least that it took, since a machine has other things to do.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from jaxcb.cache import cache_dir
from jaxcb.config import EngineConfig
from jaxcb.engine.core import EngineCore
from jaxcb.engine.sizing import backend_of, buckets_of, limits_of, resolve_config, shape_of
from jaxcb.engine.step_log import StepLog
from jaxcb.models import ModelSpec
from jaxcb.models.params import Params
from jaxcb.request import Request, SamplingParams
from jaxcb.scheduler import Scheduler, SchedulerLimits
from jaxcb.step.runner import Runner
from jaxcb.weights import load
from jaxcb.weights.loader import prepared

Lengths = list[tuple[int, int]]


def _drawn(seed: int, count: int) -> Lengths:
    random = np.random.default_rng(seed)
    prompts, answers = random.integers(10, 400, count), random.integers(5, 120, count)
    return list(zip(prompts.tolist(), answers.tolist(), strict=True))


REQUESTS = {"a": _drawn(5, 24), "b": _drawn(6, 32)}
"""Tokens of prompt and answer; all requests are there at the start."""
NUM_ROUNDS = 6
CONFIG = EngineConfig(
    max_model_len=1024,
    max_num_seqs=32,
    max_num_batched_tokens=512,
    num_kv_pages=2048,
    enable_prefix_caching=False,
    decode_buckets=(4, 16),
    mixed_buckets=(128,),
)
LIMITS = SchedulerLimits(
    max_num_seqs=32,
    max_num_batched_tokens=512,
    max_model_len=1024,
    num_kv_pages=2048,
    page_size=16,
    num_slots=64,
    enable_prefix_caching=False,
)


class Machine:
    """A compiled runner, whose steps can be recorded."""

    def __init__(self, spec: ModelSpec, params: Params, config: EngineConfig):
        self._weights = params["embed"]["embedding"].dtype
        self.spec, self.itemsize = spec, self._weights.itemsize
        self.config = self.config_of(config)
        params = prepared(params, spec, config)
        self.runner = Runner(spec, params, buckets_of(self.config), shape_of(self.config), backend_of(self.config))
        self.runner.compile(cache_dir(), progress=False)

    def config_of(self, config: EngineConfig) -> EngineConfig:
        """``config`` for this model, every None resolved."""
        return resolve_config(config, self.spec, self._weights)

    def record(self, lengths: Lengths, file: Path) -> None:
        """Run requests of such lengths, all there at the start, to their end."""
        costs = self.config.backend != "native"
        kv_bytes = self.spec.kv_bytes_per_token(self.itemsize)
        buckets = self.runner.buckets
        log = StepLog(file, self.spec, buckets, self.itemsize, kv_bytes_per_token=kv_bytes, padding_costs=costs)
        scheduler = Scheduler(limits_of(self.config, self.spec))
        core = EngineCore(scheduler, self.runner, run_ahead=self.config.run_ahead, step_log=log)
        for number, (num_prompt, num_answer) in enumerate(lengths):
            prompt = [10 + (7 * number + i) % (self.spec.vocab_size - 20) for i in range(num_prompt)]
            sampling = SamplingParams(temperature=0.0, max_tokens=num_answer, ignore_eos=True)
            core.add(Request(request_id=str(number), prompt_token_ids=prompt, sampling=sampling))
        while core.has_work:
            core.step()
        log.close()


def fastest(files: list[Path]) -> str:
    """The log of equal runs with each step's least time."""
    runs = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    header, steps = runs[0][0], zip(*(run[1:] for run in runs), strict=True)
    records = [header, *(min(same, key=lambda record: record["wall_ms"]) for same in steps)]
    return "".join(json.dumps(record) + "\n" for record in records)


def main(folder: Path) -> None:
    """Write a recording of each list of requests."""
    model = load(CONFIG)
    machine = Machine(model.spec, model.params, CONFIG)
    with tempfile.TemporaryDirectory() as rounds:
        machine.record(REQUESTS["a"][:4], Path(rounds) / "warm-up.jsonl")
        for number in range(NUM_ROUNDS):
            for name, lengths in REQUESTS.items():
                machine.record(lengths, Path(rounds) / f"{name}{number}.jsonl")
        for name in REQUESTS:
            text = fastest([Path(rounds) / f"{name}{number}.jsonl" for number in range(NUM_ROUNDS)])
            (folder / f"smollm2-{name}.jsonl").write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
