"""What two sides must have in common, so that the KV of one means the same to the other."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import numpy as np

from jaxcb.engine import Engine

PROTOCOL = 1
_WORDS = {
    "jaxcb": "versions of jaxcb",
    "protocol": "versions of the protocol",
    "spec": "models (their shapes differ)",
    "devices": "numbers of devices (tensor_parallel_size)",
    "weights": "weights of the model",
    "page": "pages (shape and dtype)",
    "settings": "settings (backend, deterministic, fast_norm, logprobs_mode, quantization)",
    "processors": "logits processors",
    "connector": "connectors",
}


def identity_of(engine: Engine, connector: str) -> dict[str, str]:
    """Of an engine that runs."""
    config, rows = engine.config, engine.handovers.page_rows
    settings = (config.backend, config.deterministic, config.fast_norm, config.logprobs_mode, config.quantization)
    return {
        "jaxcb": _version(),
        "protocol": str(PROTOCOL),
        "spec": hashlib.sha256(repr(engine.spec).encode()).hexdigest()[:16],
        "devices": str(engine.placement.size),
        "weights": fingerprint(engine.params),
        "page": f"{'x'.join(map(str, rows.shape[1:]))} {rows.dtype}",
        "settings": ", ".join(map(str, settings)),
        "processors": ", ".join(processor.apply.__qualname__ for processor in config.logits_processors),
        "connector": connector,
    }


def difference(ours: Mapping[str, str], theirs: Mapping[str, Any]) -> str | None:
    """What is not the same on both sides, in words; None if nothing is."""
    for name, words in _WORDS.items():
        if ours[name] != theirs.get(name):
            return f"the two sides have different {words}: {ours[name]!r} here, {theirs.get(name)!r} there"
    return None


def fingerprint(params: Any) -> str:
    """Of a model's weights: a few numbers of each array, which training changes."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        corner = leaf[tuple(slice(0, 4) for _ in leaf.shape)]
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode())
        digest.update(np.asarray(corner).tobytes())
    return digest.hexdigest()[:16]


def proof(secret: str, nonce: str) -> str:
    """That one knows the secret, without saying it."""
    return hmac.new(secret.encode(), nonce.encode(), hashlib.sha256).hexdigest()


def is_proof(given: str, secret: str, nonce: str) -> bool:
    """It is the :func:`proof` of this secret."""
    return hmac.compare_digest(proof(secret, nonce).encode(), given.encode(errors="replace"))


def _version() -> str:
    try:
        return version("jaxcb")
    except PackageNotFoundError:  # a checkout that isn't installed
        return "unknown"
