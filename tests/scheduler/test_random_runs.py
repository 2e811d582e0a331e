"""Random arrivals, aborts, stops, forks, pins and resets under random limits, every knob among them: each answer equals
what the request gets alone, every invariant holds after every step, everything ends, and nothing is left."""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from jaxcb.errors import ConfigError
from tests.scheduler.fuzz import Fuzz, fuzz_or_none

STEPS_A_LIFE = 250
LIVES_IN_CI = 450
"""With the rest of each life more than 100,000 steps. JAXCB_FUZZ_LIVES asks for another number."""
NUM_PARTS = 10


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_every_answer_is_that_of_the_request_alone(part):
    lives = int(os.environ.get("JAXCB_FUZZ_LIVES", LIVES_IN_CI)) // NUM_PARTS
    steps = 0
    for seed in range(part * lives, (part + 1) * lives):
        if (fuzz := fuzz_or_none(seed)) is None:
            continue
        try:
            fuzz.run(STEPS_A_LIFE)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {fuzz.changes}: {error!r}") from error
        steps += fuzz.num_steps
    assert steps > 0.9 * lives * STEPS_A_LIFE, "too many of the random limits contradict each other"


class SchedulerLife(RuleBasedStateMachine):
    """The same operations in an order that hypothesis chooses, so that it can shrink what fails."""

    @initialize(seed=st.integers(0, 10**6))
    def start(self, seed: int) -> None:
        self.fuzz = None
        while self.fuzz is None:
            try:
                self.fuzz = Fuzz(seed)
            except ConfigError:
                seed += 1

    @precondition(lambda self: len(self.fuzz.wanted) < 12)
    @rule(seed=st.integers(0, 10**6))
    def arrive(self, seed: int) -> None:
        self.fuzz.rng = random.Random(seed)
        self.fuzz.arrive()

    @precondition(lambda self: self._live())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.fuzz.abort(data.draw(st.sampled_from(self._live())))

    @precondition(lambda self: self._live())
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.fuzz.fork(data.draw(st.sampled_from(self._live())))

    @rule()
    def pin(self) -> None:
        self.fuzz.pin()

    @rule()
    def reset(self) -> None:
        self.fuzz.driver.scheduler.prefixes.reset()

    @precondition(lambda self: self.fuzz.driver.in_flight)
    @rule()
    def commit(self) -> None:
        self.fuzz.driver.commit()

    @precondition(lambda self: self.fuzz.driver.in_flight or self.fuzz.driver.scheduler.has_requests)
    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.fuzz.driver.in_flight or self.fuzz.driver.scheduler.has_requests:
                self.fuzz.driver.step()

    def teardown(self) -> None:
        if getattr(self, "fuzz", None) is not None:
            self.fuzz.drain()

    def _live(self) -> list[str]:
        done = self.fuzz.driver.finished.keys() | self.fuzz.aborted
        return [name for name in self.fuzz.wanted if name not in done]


TestSchedulerLife = SchedulerLife.TestCase
TestSchedulerLife.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
