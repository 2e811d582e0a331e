"""jaxcb: continuous batching for JAX.

``jaxcb.generate`` is the offline API, ``python -m jaxcb.serve`` the server. Importing this package imports no jax.
"""

from jaxcb.config import EngineConfig
from jaxcb.request import FinishReason, RequestOutput, SamplingParams
from jaxcb.structured_outputs import StructuredOutputs

__all__ = ["EngineConfig", "FinishReason", "RequestOutput", "SamplingParams", "StructuredOutputs"]
__version__ = "0.1.0"
