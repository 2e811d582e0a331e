"""Several engines behind one queue: which of them is given a request.

An engine here is what :class:`jaxcb.engine.Engine` shows to callers; nothing below that line is known.
"""

from jaxcb.cluster.replicas import Replicas
from jaxcb.cluster.start import start

__all__ = ["Replicas", "start"]
