"""Parameters that a caller holds, as the decoder wants them: checked, and where need be found by their names."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from jaxcb.devices import Placement
from jaxcb.errors import ModelError
from jaxcb.models import families
from jaxcb.models.params import Params, insert
from jaxcb.models.spec import ModelSpec
from jaxcb.text import Tokenizer
from jaxcb.weights.placed import placer

_Keys = tuple[str, ...]
_WEIGHT_NAMES = ("kernel", "weight", "embedding", "scale")


def held_params(spec: ModelSpec, params: Any, placement: Placement | None = None) -> Params:
    """The decoder's parameters. Arrays that are as it wants them are used as they are, not copied.

    Arguments:
        params: a nested dict or an nnx model; see :class:`jaxcb.held_model.HeldModel`.
        placement: where they are to lie; None: where they do.

    Raises:
        ModelError: a parameter is missing, has another shape, is deleted, or has no place in such a model; the message
            names it.
    """
    if not isinstance(spec, ModelSpec):
        raise ModelError(f"a held model needs a ModelSpec, got {type(spec).__name__}")
    nnx = sys.modules.get("flax.nnx")  # whoever has such a model has imported it; it takes a second
    if nnx is not None and isinstance(params, nnx.Module):
        params = nnx.to_pure_dict(nnx.state(params, nnx.Param))
    if not isinstance(params, Mapping):
        raise ModelError(f"params must be a nested dict or an nnx model, got {type(params).__name__}")
    flat = dict(_leaves(params))
    names = {f"model.{_plain_name(path)}" for path in flat}
    wanted = {tuple(map(str, parameter.path)): parameter for parameter in families.parameters(spec, names)}
    ours = 2 * len(wanted.keys() & flat.keys()) > len(wanted)
    arrays, left = (_by_path if ours else _by_name)(flat, wanted)
    if left:
        raise ModelError(
            f"the params hold {', '.join(sorted(left)[:8])}, for which a model of this spec has no place: they would "
            "be left out of every answer"
        )
    result: Params = {}
    place = placer(spec, placement)
    for path, parameter in wanted.items():
        array = arrays[path].astype(jnp.float32) if parameter.kind == "scale" else arrays[path]
        insert(result, parameter.path, place(parameter.path, array))
    return result


def _by_path(
    flat: Mapping[_Keys, Any], wanted: Mapping[_Keys, families.Parameter]
) -> tuple[dict[_Keys, Any], list[str]]:
    """Arrays in the decoder's own layout, and the names of those that are left."""
    arrays = {}
    for path, parameter in wanted.items():
        name = ".".join(path)
        if path not in flat:
            raise ModelError(f"the params have no {name}; they have {_some(map('.'.join, flat))}")
        arrays[path] = _shaped(name, flat[path], parameter.shape)
    return arrays, [".".join(path) for path in flat if path not in wanted]


def _by_name(
    flat: Mapping[_Keys, Any], wanted: Mapping[_Keys, families.Parameter]
) -> tuple[dict[_Keys, Any], list[str]]:
    """The same of arrays under the names of a checkpoint."""
    by_name = {_plain_name(path): (path, value) for path, value in flat.items()}
    arrays: dict[_Keys, Any] = {}
    left = by_name.keys() - {_short(source.name) for parameter in wanted.values() for source in parameter.sources}
    for path, parameter in wanted.items():
        parts = [_found(by_name, source) for source in parameter.sources]
        arrays[path] = parts[0] if len(parts) == 1 else jnp.concatenate(parts).reshape(parameter.shape)
    return arrays, list(left)


def _leaves(tree: Any, path: _Keys = ()) -> list[tuple[_Keys, Any]]:
    if isinstance(tree, Mapping):
        return [leaf for key, value in tree.items() for leaf in _leaves(value, (*path, str(key)))]
    if isinstance(tree, list | tuple):
        return [leaf for key, value in enumerate(tree) for leaf in _leaves(value, (*path, str(key)))]
    return [(path, tree)]


def _plain_name(path: _Keys) -> str:
    """As in a checkpoint, without the "model." that some put before everything."""
    *parents, last = path
    return _short(".".join([*parents, "weight" if last in _WEIGHT_NAMES else last]))


def _short(name: str) -> str:
    return name.removeprefix("model.")


def _found(by_name: Mapping[str, tuple[_Keys, Any]], source: families.Source) -> Any:
    """Linear layers of flax keep their kernels [in, out], checkpoints [out, in]."""
    name = _short(source.name)
    if name not in by_name:
        raise ModelError(f"the params have no {source.name}; they have {_some(by_name)}")
    path, array = by_name[name]
    return _shaped(source.name, array.T if path[-1] == "kernel" else array, source.shape)


def _some(names: Iterable[str]) -> str:
    first = sorted(names)[:8]
    return f"{', '.join(first)}, ..." if first else "nothing"


def _shaped(name: str, array: Any, shape: tuple[int, ...]) -> Any:
    if not isinstance(array, jax.Array | np.ndarray):
        raise ModelError(f"{name} must be an array, got {type(array).__name__}")
    if isinstance(array, jax.Array) and array.is_deleted():
        raise ModelError(f"the array of {name} has been deleted (given to a function that donates it, say)")
    if array.shape != shape:
        raise ModelError(f"{name} must have shape {shape}, got {array.shape}")
    return array


def no_tokenizer(spec: ModelSpec) -> Tokenizer:
    """For prompts of token ids: its one token is an id that the model doesn't have."""
    return Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel({"": spec.vocab_size}, unk_token="")))
