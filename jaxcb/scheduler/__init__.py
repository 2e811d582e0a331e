"""Decides, before each step, which tokens of which sequences it computes; learns afterwards what was sampled.

No jax comes in here: the same objects run under the engine and, with a virtual clock, under the simulator.
"""

from jaxcb.scheduler.knobs import SchedulerLimits, SchedulingKnobs, knob_values
from jaxcb.scheduler.load import StepLoad, load_of
from jaxcb.scheduler.plan import DecodeRow, PlanRow, Row, StepPlan, StepTokens, TokenEvent
from jaxcb.scheduler.scheduler import Scheduler
from jaxcb.scheduler.sequence import Sequence, Status

__all__ = [
    "DecodeRow",
    "PlanRow",
    "Row",
    "Scheduler",
    "SchedulerLimits",
    "SchedulingKnobs",
    "Sequence",
    "Status",
    "StepLoad",
    "StepPlan",
    "StepTokens",
    "TokenEvent",
    "knob_values",
    "load_of",
]
