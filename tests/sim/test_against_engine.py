"""The simulator against the engine: the same requests must make the same steps, and take the time that they took.

``recordings/`` holds two step logs of SmolLM2-135M on a busy CPU of two cores, with other requests each; a step's time
is the least of six runs, which took turns. They were made by :func:`tests.sim.record.main`, which says how; what the
simulator knows of them are the numbers of tokens.
"""

import dataclasses
from pathlib import Path

import pytest

from jaxcb.config import EngineConfig
from jaxcb.sim import StepTimeModel, TraceRequest, one_engine
from jaxcb.sim.calibrate import fit, read_step_log
from jaxcb.sim.simulator import run
from tests.engine.conftest import SPEC, sensitive_params
from tests.scheduler.fake_device import limits
from tests.sim.record import LIMITS, REQUESTS, Machine
from tests.sim.runs import watched

RECORDINGS = Path(__file__).parent / "recordings"


def assert_agrees(name: str, model: StepTimeModel) -> None:
    """The requests of a recording, simulated: the same steps, and their time within a tenth of what they took."""
    real = read_step_log(RECORDINGS / f"smollm2-{name}.jsonl")
    loads, on_plan = watched()
    trace = [TraceRequest(0.0, *lengths) for lengths in REQUESTS[name]]
    simulation = one_engine(LIMITS, trace, model, padding=real.padded, on_plan=on_plan)
    run(simulation)
    assert loads == [step.load for step in real.steps]
    measured_s, simulated_s = sum(step.wall_s for step in real.steps), simulation.result().duration_s
    print(f"{name}: {simulated_s / measured_s - 1:+.1%} of {measured_s:.1f} s")
    assert simulated_s == pytest.approx(measured_s, rel=0.1)


@pytest.mark.parametrize("name", REQUESTS)
def test_a_recorded_run_is_replayed_step_by_step_and_its_time_agrees(name):
    assert_agrees(name, StepTimeModel.fit(RECORDINGS / f"smollm2-{name}.jsonl"))


@pytest.mark.parametrize(("seen", "unseen"), [("a", "b"), ("b", "a")])
def test_a_model_fitted_to_one_run_predicts_the_time_of_another(seen, unseen):
    assert_agrees(unseen, StepTimeModel.fit(RECORDINGS / f"smollm2-{seen}.jsonl"))


@pytest.mark.parametrize("name", REQUESTS)
def test_a_model_fitted_to_every_other_step_predicts_the_steps_between(name):
    real = read_step_log(RECORDINGS / f"smollm2-{name}.jsonl")
    model = fit(dataclasses.replace(real, steps=real.steps[::2]))
    unseen = real.steps[1::2]
    predicted_s = sum(model.step_s(step.load._replace(num_tokens=step.padded_tokens)) for step in unseen)
    measured_s = sum(step.wall_s for step in unseen)
    print(f"{name}: {predicted_s / measured_s - 1:+.1%} of {measured_s:.1f} s")
    assert predicted_s == pytest.approx(measured_s, rel=0.1)


def test_a_live_run_is_replayed_step_by_step_and_its_time_agrees(tmp_path):
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 128, "max_model_len": 700, "num_kv_pages": 400}
    config = EngineConfig(**sizes, dtype="float32", enable_prefix_caching=False, decode_buckets=(), mixed_buckets=())
    machine = Machine(SPEC, sensitive_params(SPEC, seed=3), config)
    lengths = [(20 + 13 * number, 10 + 7 * (number % 5)) for number in range(16)]
    for _ in range(2):  # the first run touches memory and code for the first time
        machine.record(lengths, tmp_path / "steps.jsonl")
    real = read_step_log(tmp_path / "steps.jsonl")
    loads, on_plan = watched()
    model = StepTimeModel.fit(tmp_path / "steps.jsonl")
    trace = [TraceRequest(0.0, *each) for each in lengths]
    same = limits(**sizes, page_size=16, enable_prefix_caching=False)
    simulation = one_engine(same, trace, model, padding=real.padded, on_plan=on_plan)
    run(simulation)
    assert loads == [step.load for step in real.steps]
    measured_s, simulated_s = sum(step.wall_s for step in real.steps), simulation.result().duration_s
    print(f"{simulated_s / measured_s - 1:+.1%} of {measured_s:.3f} s")
    assert simulated_s == pytest.approx(measured_s, rel=0.1)
