"""Pages leave the device and come back, or are copied, and the answers stay the same."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxcb.cache import cache_dir
from jaxcb.config import EngineConfig
from jaxcb.engine.core import EngineCore
from jaxcb.engine.sizing import backend_of, buckets_of, limits_of, resolve_config, scheduler_of, shape_of
from jaxcb.models import ModelSpec
from jaxcb.models.params import Params
from jaxcb.request import FinishReason, Request, SamplingParams
from jaxcb.scheduler import Scheduler
from jaxcb.scheduler.replay import replay
from jaxcb.step.runner import Runner
from jaxcb.weights.loader import prepared
from tests.engine.conftest import SPEC, sensitive_params

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
PAGE_GIB = 2 * 2 * 16 * 2 * 16 * 4 / 2**30
"""Of a page in the small model, float32."""


def runner_of(spec: ModelSpec, params: Params, config: EngineConfig) -> Runner:
    """Compiled."""
    params = prepared(params, spec, config)
    runner = Runner(spec, params, buckets_of(config), shape_of(config), backend_of(config))
    runner.compile(cache_dir(), progress=False)
    return runner


class Cores:
    """Cores over one compiled runner, driven without threads."""

    def __init__(self, params, **changes):
        values = {
            "dtype": "float32",
            "max_num_seqs": 6,
            "max_num_batched_tokens": 64,
            "max_model_len": 256,
            "num_kv_pages": 24,
            "decode_buckets": (),
            "mixed_buckets": (),
            "host_kv_gib": 64 * PAGE_GIB,
        } | changes
        self.config = resolve_config(EngineConfig(**values), SPEC, np.float32)
        self.runner = runner_of(SPEC, params, self.config)

    def core(self, **changes) -> EngineCore:
        config = EngineConfig(**{**vars(self.config), **changes})
        return EngineCore(scheduler_of(config, SPEC), self.runner, run_ahead=config.run_ahead)


@pytest.fixture(scope="module")
def cores(params) -> Cores:
    return Cores(params)


def run(core: EngineCore, max_steps: int = 3000) -> dict[str, list[int]]:
    """Step until nothing is left."""
    answers: dict[str, list[int]] = {}
    for _ in range(max_steps):
        if not core.has_work:
            return answers
        for event in core.step():
            answers.setdefault(event.sequence.request.request_id, []).append(event.token_id)
        core.scheduler.check()
    raise AssertionError("it never ends")


def add(core: EngineCore, name: str, prompt: list[int], sampling: SamplingParams = GREEDY, **fields) -> None:
    core.add(Request(request_id=name, prompt_token_ids=prompt, sampling=sampling, **fields))


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, SPEC.vocab_size, length).tolist()


@pytest.fixture(scope="module")
def alone(cores) -> dict[str, list[int]]:
    answers = {}
    for i in range(6):
        core = cores.core(enable_prefix_caching=False, run_ahead=False)
        add(core, str(i), prompt(40 + 9 * i, seed=i))
        answers |= run(core)
    assert len({tuple(answer) for answer in answers.values()}) == 6
    return answers


@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_a_preempted_request_answers_the_same(preemption, caching, run_ahead, cores, alone):
    core = cores.core(
        preemption=preemption, admission_watermark=0.0, enable_prefix_caching=caching, run_ahead=run_ahead
    )
    for i in range(6):
        add(core, str(i), prompt(40 + 9 * i, seed=i))
    assert run(core) == alone
    counters = core.scheduler.counters
    assert counters.preemptions > 0
    assert counters.swaps == (counters.preemptions if preemption == "swap" else 0)
    assert core.scheduler.host.num_used == core.scheduler.host.num_freed


def test_a_sequence_swapped_out_twice_in_a_row_while_others_wait_answers_the_same(cores, alone):
    core = cores.core(preemption="swap", admission_watermark=0.0)
    for i in range(4):
        add(core, str(i), prompt(40 + 9 * i, seed=i))
    answers: dict[str, list[int]] = {}
    number = 0
    while core.has_work:
        number += 1
        if number % 7 == 0 and core.scheduler.num_running > 1:
            victim = next(reversed(core.scheduler.roster.running.values()))
            core.scheduler.preemption.preempt(victim)
        for event in core.step():
            answers.setdefault(event.sequence.request.request_id, []).append(event.token_id)
        core.scheduler.check()
        assert number < 3000
    assert answers == {str(i): alone[str(i)] for i in range(4)}
    assert core.scheduler.counters.swaps > 5


def test_prefixes_that_the_device_had_no_room_for_come_back_from_host_memory(cores, alone):
    core = cores.core()
    for _ in range(2):
        for i in range(6):
            add(core, str(i), prompt(40 + 9 * i, seed=i))
            assert run(core) == {str(i): alone[str(i)]}
    counters = core.scheduler.counters
    assert core.scheduler.cache.num_brought_back > 6
    cached = sum((40 + 9 * i - 1) // 16 * 16 for i in range(6))
    assert counters.prompt_tokens_cached == cached, "the second round finds every full page"


@pytest.mark.parametrize("caching", [True, False])
def test_choices_of_one_prompt_share_its_pages_and_answer_as_if_alone(caching, cores, alone):
    core = cores.core(enable_prefix_caching=caching)
    core.scheduler.add_choices(
        [Request(request_id=f"c{i}", prompt_token_ids=prompt(49, seed=1), sampling=GREEDY) for i in range(4)]
    )
    computed = 0
    answers: dict[str, list[int]] = {}
    while core.has_work:
        for event in core.step():
            answers.setdefault(event.sequence.request.request_id, []).append(event.token_id)
        if core._in_flight:
            plan = core._in_flight[-1].plan
            computed += plan.num_tokens - plan.num_decodes
    assert answers == {f"c{i}": alone["1"] for i in range(4)}
    assert computed <= 49 + 3, "the others compute only the prompt's last token again"


def test_a_fork_in_the_middle_of_an_answer_goes_on_as_its_parent(cores, alone):
    core = cores.core(enable_prefix_caching=False)
    add(core, "parent", prompt(49, seed=1))
    while (
        core.scheduler.roster.running.get("parent") is None
        or core.scheduler.roster.running["parent"].num_generated < 10
    ):
        core.step()
    parent = core.scheduler.roster.running["parent"]
    so_far = list(parent.token_ids)
    rest = SamplingParams(temperature=0, max_tokens=49 + 40 - len(so_far), ignore_eos=True)
    core.scheduler.add(Request(request_id="fork", prompt_token_ids=so_far, sampling=rest), parent_id="parent")
    fork_answer = run(core)["fork"]
    assert so_far[49:] + fork_answer == alone["1"]


def test_an_abort_while_swapped_out_frees_host_memory(cores):
    core = cores.core(preemption="swap", admission_watermark=0.0)
    for i in range(6):
        add(core, str(i), prompt(60, seed=i))
    while not core.scheduler.counters.swaps:
        core.step()
    swapped = [sequence for sequence in core.scheduler.roster.waiting if sequence.num_swapped]
    for sequence in swapped:
        core.finish(sequence.request.request_id, FinishReason.ABORT)
    run(core)
    assert core.scheduler.host.num_used == core.scheduler.host.num_freed
    assert core.scheduler.num_live_pages == 0


def test_what_an_engine_recorded_is_planned_the_same_again(cores, alone, tmp_path):
    log = tmp_path / "log.jsonl"
    core = cores.core(preemption="swap", admission_watermark=0.0, event_log=log)
    for i in range(6):
        add(core, str(i), prompt(40 + 9 * i, seed=i))
    assert run(core) == alone
    assert core.scheduler.counters.swaps > 0
    assert len(replay(log.read_text().splitlines())) == core.num_steps


def test_pages_behind_the_window_are_given_back_and_the_answer_stays_the_same():
    spec = dataclasses.replace(SPEC, windows=(48, 32))
    weights = sensitive_params(spec, seed=5)
    config = resolve_config(
        EngineConfig(
            dtype="float32",
            max_num_seqs=2,
            max_num_batched_tokens=64,
            max_model_len=256,
            num_kv_pages=32,
            decode_buckets=(),
            mixed_buckets=(),
            host_kv_gib=64 * PAGE_GIB,
            preemption="swap",
        ),
        spec,
        np.float32,
    )
    runner = runner_of(spec, weights, config)
    limits = limits_of(config, spec)
    assert limits.sliding_window == 48
    sampling = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    answers, peaks = [], []
    for window, swaps in ((None, False), (48, False), (48, True)):
        core = EngineCore(
            Scheduler(dataclasses.replace(limits, sliding_window=window)), runner, run_ahead=config.run_ahead
        )
        add(core, "a", prompt(90, seed=7), sampling)
        answer, peak = [], 0
        while core.has_work:
            if swaps and len(answer) in (20, 55):
                core.scheduler.preemption.preempt(core.scheduler.roster.running["a"])
                answer += [event.token_id for event in core.step()]
            answer += [event.token_id for event in core.step()]
            if len(answer) > 10:
                peak = max(peak, core.scheduler.pool.num_used)
            core.scheduler.check()
        answers.append(answer)
        peaks.append(peak)
        assert core.scheduler.counters.swaps == (2 if swaps else 0)
    assert answers[0] == answers[1] == answers[2]
    assert peaks[0] == 12 and peaks[1] <= 5
