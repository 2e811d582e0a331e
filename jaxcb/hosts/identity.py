"""What every host of an engine must have in common: what they run, before jax is started; then what they loaded."""

from __future__ import annotations

import hashlib
from typing import Any

from jaxcb.config import EngineConfig
from jaxcb.devices import Placement
from jaxcb.disagg.identity import digest_of, sample_of, versions
from jaxcb.models import ModelSpec
from jaxcb.step.program_store import machine

PROTOCOL = 1
WORDS = {
    "jaxcb": "versions of jaxcb",
    "jax": "versions of jax",
    "protocol": "versions of the protocol",
    "nnodes": "numbers of hosts (--nnodes)",
    "tensor_parallel_size": "numbers of devices (--tensor-parallel-size)",
    "enable_expert_parallel": "ways to share experts out (--enable-expert-parallel)",
    "device": "kinds of devices, which may round differently",
    "spec": "models (their shapes differ)",
    "weights": "weights of the model",
    "settings": "settings (backend, dtype, deterministic, logprobs_mode, logits_processors)",
    "sizes": "sizes of steps and pages",
}


def program_of(config: EngineConfig) -> dict[str, str]:
    """Before jax is started."""
    return {
        **versions(),
        "protocol": str(PROTOCOL),
        "nnodes": str(config.nnodes),
        "tensor_parallel_size": str(config.tensor_parallel_size),
        "enable_expert_parallel": str(config.enable_expert_parallel),
    }


def model_of(spec: ModelSpec, weights: Weights, resolved: EngineConfig, placement: Placement) -> dict[str, str]:
    """Once the model is loaded."""
    device = placement.own[0][1]
    settings = (resolved.backend, resolved.dtype, resolved.deterministic, resolved.logprobs_mode)
    return {
        "device": digest_of(machine()) if device.platform == "cpu" else device.device_kind,
        "spec": digest_of(repr(spec)),
        "settings": ", ".join(map(str, (*settings, *(each.apply.__qualname__ for each in resolved.logits_processors)))),
        "weights": weights.digest(),  # which hangs on the dtype: that is named then
    }


class Weights:
    """A witness of parameters, as :class:`Placement` has one: numbers of each, which training changes."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def __call__(self, path: tuple[Any, ...], array: Any) -> None:
        self._digest.update(sample_of(".".join(map(str, path)), array))

    def digest(self) -> str:
        return self._digest.hexdigest()[:16]
