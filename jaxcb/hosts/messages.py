"""Orders as messages: a JSON part, and the bytes of all arrays one after the other.

What grows with the number of pages or with the vocabulary is an array there: the JSON part is small, whatever is
ordered.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxcb.errors import PeerError
from jaxcb.paging import PageMoves
from jaxcb.sampling import Tier
from jaxcb.step.buckets import Bucket
from jaxcb.step.orders import (
    ControlRow,
    ForwardOrder,
    MoveOrder,
    Order,
    PagesOrder,
    PooledRows,
    ProcessorStates,
    PromptRows,
    RowMasks,
    SampleOrder,
)

_ORDERS = (ForwardOrder, SampleOrder, MoveOrder, PagesOrder)
_PARTS = (Bucket, ControlRow, PageMoves, PooledRows, ProcessorStates, PromptRows, RowMasks)
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (*_ORDERS, *_PARTS)}
_FIELDS = {
    name: kind._fields if issubclass(kind, tuple) else tuple(field.name for field in dataclasses.fields(kind))
    for name, kind in _KINDS.items()
}
_KINDS["Tier"], _FIELDS["Tier"] = Tier, ("value",)


def pack(order: Order) -> tuple[dict[str, Any], bytes]:
    arrays: list[np.ndarray] = []
    plain = _plain(order, arrays)
    native = [array.astype(array.dtype.newbyteorder("="), copy=False) for array in arrays]
    kinds = [[array.dtype.name, list(array.shape)] for array in native]  # bfloat16 has no other word for itself
    return {"order": plain, "arrays": kinds}, b"".join(array.tobytes() for array in native)


def unpack(message: dict[str, Any], body: bytes) -> Order:
    """Raises PeerError if it is none."""
    try:
        arrays, start = [], 0
        for dtype, shape in message["arrays"]:
            array = np.frombuffer(body, jnp.dtype(dtype), int(np.prod(shape, dtype=np.int64)), start)
            arrays.append(array.reshape(shape))
            start += array.nbytes
        order = _made(message["order"], arrays)
    except (TypeError, KeyError, ValueError, IndexError) as error:
        raise PeerError(f"the other side sent an order that can't be read: {error}") from error
    if not isinstance(order, _ORDERS):
        raise PeerError(f"the other side sent {type(order).__name__} as an order")
    return order


def _plain(value: Any, arrays: list[np.ndarray]) -> Any:
    """Arrays as {"array": index}, lists of pairs as {"pairs": index}, orders and their parts as {"is": name, "fields":
    [...]}."""
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {"array": len(arrays) - 1}
    name = type(value).__name__
    if name in _KINDS:
        return {"is": name, "fields": [_plain(getattr(value, field), arrays) for field in _FIELDS[name]]}
    if _are_pairs(value):
        arrays.append(np.asarray(value, np.int64))
        return {"pairs": len(arrays) - 1}
    if isinstance(value, list | tuple):
        return [_plain(each, arrays) for each in value]
    return value


def _made(value: Any, arrays: list[np.ndarray]) -> Any:
    if isinstance(value, list):
        return [_made(each, arrays) for each in value]
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return arrays[value["array"]]
    if "pairs" in value:
        return [(first, second) for first, second in arrays[value["pairs"]].tolist()]
    return _KINDS[value["is"]](*[_made(each, arrays) for each in value["fields"]])


def _are_pairs(value: Any) -> bool:
    """Numbers of pages, of which a step may bring a million."""
    return isinstance(value, list) and bool(value) and all(type(each) is tuple and len(each) == 2 for each in value)
