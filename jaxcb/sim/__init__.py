"""The real Scheduler under a virtual clock and a step-time model: policies, budgets and machines compared on a laptop.

Nothing here imports jax, and nothing may: a run needs no device and no model weights.
"""

from jaxcb.scheduler import StepLoad
from jaxcb.sim.clusters import Machine
from jaxcb.sim.comparison import Limits, compare
from jaxcb.sim.gpus import GPUS, Gpu
from jaxcb.sim.loaders import load_trace
from jaxcb.sim.models import MODELS, Model, ModelShape
from jaxcb.sim.replica import ReplicaSpec
from jaxcb.sim.result import Distribution, RequestRecord, Result
from jaxcb.sim.simulator import Simulation, one_engine, simulate
from jaxcb.sim.sizing import limits_on
from jaxcb.sim.step_time import LinearStepTime, StepTime, StepTimeModel
from jaxcb.sim.sweep import sweep
from jaxcb.sim.trace import TraceRequest
from jaxcb.sim.traces import TRACES, make_trace

__all__ = [
    "GPUS",
    "MODELS",
    "TRACES",
    "Distribution",
    "Gpu",
    "Limits",
    "LinearStepTime",
    "Machine",
    "Model",
    "ModelShape",
    "ReplicaSpec",
    "RequestRecord",
    "Result",
    "Simulation",
    "StepLoad",
    "StepTime",
    "StepTimeModel",
    "TraceRequest",
    "compare",
    "limits_on",
    "load_trace",
    "make_trace",
    "one_engine",
    "simulate",
    "sweep",
]
