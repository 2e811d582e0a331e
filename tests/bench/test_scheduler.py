import dataclasses

import pytest

from bench.scheduler import Case, Loaded, measure
from jaxcb.scheduler.policy import POLICIES


def test_everything_decodes_while_it_is_measured():
    loaded = Loaded(Case(running=8, waiting=5), seed=0)
    for _ in range(3):
        loaded.step()
    assert (loaded.scheduler.num_running, loaded.scheduler.num_waiting) == (8, 5)
    assert loaded.scheduler.plan().decode_only


@pytest.mark.parametrize("policy", POLICIES)
def test_with_changes_one_comes_and_one_goes_in_every_step(policy):
    loaded = Loaded(Case(running=8, waiting=5, policy=policy, changes=True), seed=0)
    counters, before = loaded.scheduler.counters, dataclasses.replace(loaded.scheduler.counters)
    for _ in range(80):
        loaded.step()
        assert loaded.scheduler.num_waiting in (4, 5)
    assert 57 * 75 <= counters.prompt_tokens - before.prompt_tokens <= 72 * 80
    assert 80 * 7 <= counters.generated_tokens - before.generated_tokens <= 80 * 8
    assert counters.preemptions == 0


def test_each_case_has_its_time():
    cases = [Case(1), Case(4, 10, "sjf")]
    times = measure(cases, num_steps=2, rounds=2)
    assert list(times) == cases and all(us > 0 for us in times.values())
