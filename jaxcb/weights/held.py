"""Parameters that a caller holds, as the decoder wants them: checked, and where need be found by their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from flax import nnx

from jaxcb.errors import ModelError
from jaxcb.models import families
from jaxcb.models.spec import ModelSpec
from jaxcb.text import Tokenizer

Params = dict[str, Any]
_WEIGHT_NAMES = ("kernel", "weight", "embedding", "scale")


def held_params(spec: ModelSpec, params: Any) -> Params:
    """The decoder's parameters. Arrays that are as it wants them are used as they are, not copied.

    Arguments:
        params: a nested dict or an nnx model; see :class:`jaxcb.held_model.HeldModel`.

    Raises:
        ModelError: a parameter is missing, or has another shape; the message names it.
    """
    if not isinstance(spec, ModelSpec):
        raise ModelError(f"a held model needs a ModelSpec, got {type(spec).__name__}")
    if isinstance(params, nnx.Module):
        params = nnx.to_pure_dict(nnx.state(params, nnx.Param))
    if not isinstance(params, Mapping):
        raise ModelError(f"params must be a nested dict or an nnx model, got {type(params).__name__}")
    flat = dict(_leaves(params))
    wanted = list(families.parameters(spec))
    ours = all(tuple(map(str, parameter.path)) in flat for parameter in wanted)
    by_name = {} if ours else {_plain_name(path): (path, value) for path, value in flat.items()}
    result: Params = {}
    for parameter in wanted:
        if ours:
            path = tuple(map(str, parameter.path))
            array = _shaped(".".join(path), flat[path], parameter.shape)
        else:
            parts = [_found(by_name, source) for source in parameter.sources]
            array = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
        if parameter.kind == "scale":
            array = array.astype(jnp.float32)
        families.insert(result, parameter.path, jax.device_put(array))
    return result


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, Mapping):
        return [leaf for key, value in tree.items() for leaf in _leaves(value, (*path, str(key)))]
    if isinstance(tree, list | tuple):
        return [leaf for key, value in enumerate(tree) for leaf in _leaves(value, (*path, str(key)))]
    return [(path, tree)]


def _plain_name(path: tuple[str, ...]) -> str:
    """As in a checkpoint, without the "model." that some put before everything."""
    *parents, last = path
    return ".".join([*parents, "weight" if last in _WEIGHT_NAMES else last]).removeprefix("model.")


def _found(by_name: Mapping[str, tuple[tuple[str, ...], Any]], source: families.Source) -> Any:
    """Linear layers of flax keep their kernels [in, out], checkpoints [out, in]."""
    name = source.name.removeprefix("model.")
    if name not in by_name:
        raise ModelError(f"the params have no {source.name}; they have {', '.join(sorted(by_name)[:8])}, ...")
    path, array = by_name[name]
    return _shaped(source.name, array.T if path[-1] == "kernel" else array, source.shape)


def _shaped(name: str, array: Any, shape: tuple[int, ...]) -> Any:
    if not isinstance(array, jax.Array | np.ndarray):
        raise ModelError(f"{name} must be an array, got {type(array).__name__}")
    if array.shape != shape:
        raise ModelError(f"{name} must have shape {shape}, got {array.shape}")
    return array


def no_tokenizer(spec: ModelSpec) -> Tokenizer:
    """For prompts of token ids: its one token is an id that the model doesn't have."""
    return Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel({"": spec.vocab_size}, unk_token="")))
