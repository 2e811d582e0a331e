"""Builders of small simulated runs."""

from __future__ import annotations

from jaxcb.scheduler import StepLoad, load_of
from jaxcb.sim import LinearStepTime, StepTimeModel
from jaxcb.sim.replica import OnPlan

MS = LinearStepTime(fixed_ms=1.0, per_token_ms=0.0)
"""Every step takes a millisecond."""


def round_model(*, kv_bandwidth: float = 4e12, attention_flops: float = 400e12) -> StepTimeModel:
    """A model of round numbers: 16 GB at 4 TB/s are 4 ms; 16 GFLOP a token at 400 TFLOP/s are 0.04 ms, so 100 tokens
    take as long as the weights."""
    return StepTimeModel(
        weight_bytes=16e9,
        flops_per_token=16e9,
        kv_bytes_per_token=100e3,
        attention_flops_per_pair=0.5e6,
        bandwidth=4e12,
        flops=400e12,
        overhead_s=0.5e-3,
        kv_bandwidth=kv_bandwidth,
        attention_flops=attention_flops,
    )


def watched() -> tuple[list[StepLoad], OnPlan]:
    """A list, and an ``on_plan`` that notes in it what each step computes."""
    loads: list[StepLoad] = []
    return loads, lambda plan, _start_s, _step_s: loads.append(load_of(plan))
