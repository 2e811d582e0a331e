"""Chooses the next token of every row of logits in one device call. Nothing here knows of requests or slots.

A tier is a compiled program; the host picks the cheapest that honours every row of the step.
"""

from jaxcb.sampling.controls import Controls
from jaxcb.sampling.sampler import Draws, Tier, sample

__all__ = ["Controls", "Draws", "Tier", "sample"]
