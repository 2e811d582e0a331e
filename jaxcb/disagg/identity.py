"""What two sides must have in common, so that the KV of one means the same to the other."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jaxlib
import numpy as np

from jaxcb.engine import Engine
from jaxcb.step.program_store import source_digest

PROTOCOL = 1
_SAMPLES = 1024
WORDS = {
    "jaxcb": "versions of jaxcb",
    "jax": "versions of jax",
    "protocol": "versions of the protocol",
    "spec": "models (their shapes differ)",
    "devices": "numbers of devices (tensor_parallel_size)",
    "experts": "ways to share experts out (enable_expert_parallel)",
    "weights": "weights of the model",
    "page": "pages (shape, dtype and order)",
    "settings": "settings (backend, deterministic, fast_norm, logprobs_mode, quantization, dtype)",
    "processors": "logits processors",
    "connector": "connectors",
}


def identity_of(engine: Engine, connector: str) -> dict[str, str]:
    """Of an engine that runs."""
    config = engine.config
    settings = (config.backend, config.deterministic, config.fast_norm, config.logprobs_mode, config.quantization)
    # What the weights' layout hangs on comes before them: it is named then.
    return {
        **versions(),
        "protocol": str(PROTOCOL),
        "spec": digest_of(repr(engine.spec)),
        "devices": str(engine.placement.size),
        "experts": str(config.enable_expert_parallel),
        "settings": ", ".join(map(str, (*settings, config.dtype))),
        "page": engine.handovers.page_form,
        "weights": fingerprint(engine.params),
        "processors": ", ".join(processor.apply.__qualname__ for processor in config.logits_processors),
        "connector": connector,
    }


def difference(ours: Mapping[str, str], theirs: Mapping[str, Any], words: Mapping[str, str] = WORDS) -> str | None:
    """What is not the same on both sides, in words; None if nothing is."""
    for name, own in ours.items():
        if own != theirs.get(name):
            return f"the two sides have different {words[name]}: {own!r} here, {theirs.get(name)!r} there"
    return None


def fingerprint(params: Any) -> str:
    """Of a model's weights: numbers of each array, which training changes."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        digest.update(sample_of(jax.tree_util.keystr(path), leaf))
    return digest.hexdigest()[:16]


def sample_of(name: str, array: Any) -> bytes:
    """What a fingerprint knows of a parameter: numbers from its first to its last, so that of what is fused or lies
    in one array (queries and keys, gate and up, experts, layers) there are some of each."""
    places = np.linspace(0, array.size - 1, min(array.size, _SAMPLES)).astype(np.int64)
    sample = array[np.unravel_index(places, array.shape)]
    return f"{name} {array.shape} {array.dtype}".encode() + np.asarray(sample).tobytes()


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def proof(secret: str, nonce: str) -> str:
    """That one knows the secret, without saying it."""
    return hmac.new(secret.encode(), nonce.encode(), hashlib.sha256).hexdigest()


def is_proof(given: str, secret: str, nonce: str) -> bool:
    """It is the :func:`proof` of this secret."""
    return hmac.compare_digest(proof(secret, nonce).encode(), given.encode(errors="replace"))


def versions() -> dict[str, str]:
    """Of what computes, this source included: others may round differently."""
    return {
        "jaxcb": f"{installed_version()} ({source_digest()[:8]})",
        "jax": f"{jax.__version__}, jaxlib {jaxlib.__version__}",
    }


def installed_version() -> str:
    try:
        return version("jaxcb")
    except PackageNotFoundError:  # a checkout that isn't installed
        return "unknown"
