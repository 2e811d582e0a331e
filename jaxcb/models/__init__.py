"""One decoder, described by a frozen ModelSpec; a family is a spec read from its config and a map of tensor names.

The decoder knows nothing of pages or batches: the step hands it the function that attends.
"""

from jaxcb.models.decoder import Attend, apply_head, apply_layers, param_shapes
from jaxcb.models.spec import ModelSpec, RopeSpec

__all__ = ["Attend", "ModelSpec", "RopeSpec", "apply_head", "apply_layers", "param_shapes"]
