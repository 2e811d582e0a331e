"""The loop: plan, launch, commit, on the one thread that owns the device; and the ways in and out of it.

The engine knows requests, the scheduler and the runner; it does not look inside a step.
"""

from jaxcb.engine.engine import Engine
from jaxcb.engine.serving import ServingEngine
from jaxcb.engine.stats import EngineStats
from jaxcb.engine.stream import OutputStream

__all__ = ["Engine", "EngineStats", "OutputStream", "ServingEngine"]
