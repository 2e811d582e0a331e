"""Several engines behind one door: which of them is given a request.

An engine here is anything with ``submit``, ``stats`` and ``shutdown``; nothing below that line is known.
"""

from jaxcb.cluster.replicas import Replicas

__all__ = ["Replicas"]
