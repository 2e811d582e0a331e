"""HeldModel: a model whose parameters the caller holds, in the place of files. No jax here."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, eq=False)
class HeldModel:
    """``EngineConfig(model=HeldModel(spec, params))``, or ``model=(spec, params)`` for short.

    Arguments:
        spec: the :class:`jaxcb.models.ModelSpec` of the parameters.
        params: as the decoder has them (layout: jaxcb/models/decoder.py), and then the engine uses these very arrays
            (the native CPU kernels: a copy in a layout of their own); or an nnx model or a nested dict whose names are
            those of a Hugging Face checkpoint of the family, and then what the decoder has fused (q, k and v; gate and
            up) is copied.
        tokenizer: a :class:`jaxcb.text.Tokenizer`; None where prompts are token ids, and answers are read as such:
            their text is empty.
        name: what answers call it.
    """

    spec: Any
    params: Any
    tokenizer: Any = None
    name: str = "held-model"

    def __str__(self) -> str:
        return self.name
