"""The capacity planner: what a model on a card, or on several, can serve, in closed formulas over the simulator's
step-time model.

``python -m jaxcb.plan`` prints it. No jax comes in here, and no weights: a plan takes milliseconds.
"""

from jaxcb.plan.capacity import Capacity, Workload
from jaxcb.plan.models import find_model

__all__ = ["Capacity", "Workload", "find_model"]
