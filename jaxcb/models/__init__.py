"""One decoder, described by a frozen ModelSpec; a family is a spec read from its config and a map of tensor names.

``decoder`` knows nothing of pages or batches: the step hands it the function that attends. ``native`` is the same
decoder on the native CPU kernels, which attend by themselves. The spec imports no jax: the decoder is loaded when its
first name is asked for.
"""

from typing import TYPE_CHECKING, Any

from jaxcb.models.spec import ModelSpec, RopeSpec

if TYPE_CHECKING:
    from jaxcb.models.decoder import Attend, apply_head, apply_layers, param_shapes

__all__ = ["Attend", "ModelSpec", "RopeSpec", "apply_head", "apply_layers", "param_shapes"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from jaxcb.models import decoder

    return getattr(decoder, name)
