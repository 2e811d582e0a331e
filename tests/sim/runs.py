"""Builders of small simulated runs."""

from __future__ import annotations

from jaxcb.scheduler import SchedulerLimits, StepLoad, load_of
from jaxcb.sim import LinearStepTime
from jaxcb.sim.replica import OnPlan

MS = LinearStepTime(fixed_ms=1.0, per_token_ms=0.0)
"""Every step takes a millisecond."""


def limits(**changes: object) -> SchedulerLimits:
    values = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
        "num_kv_pages": 64,
        "page_size": 4,
    } | changes
    values.setdefault("num_slots", 2 * values["max_num_seqs"])
    return SchedulerLimits(**values)


def watched() -> tuple[list[StepLoad], OnPlan]:
    """A list, and an ``on_plan`` that notes in it what each step computes."""
    loads: list[StepLoad] = []
    return loads, lambda plan, _start_s, _step_s: loads.append(load_of(plan))
