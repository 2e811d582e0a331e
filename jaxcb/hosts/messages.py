"""Orders as messages: a JSON part, and the bytes of all arrays one after the other."""

from __future__ import annotations

import dataclasses
from typing import Any

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
    kinds = [[array.dtype.str, list(array.shape)] for array in arrays]
    return {"order": plain, "arrays": kinds}, b"".join(array.tobytes() for array in arrays)


def unpack(message: dict[str, Any], body: bytes) -> Order:
    """Raises PeerError if it is none."""
    try:
        arrays, start = [], 0
        for dtype, shape in message["arrays"]:
            array = np.frombuffer(body, np.dtype(dtype), int(np.prod(shape, dtype=np.int64)), start)
            arrays.append(array.reshape(shape))
            start += array.nbytes
        order = _made(message["order"], arrays)
    except (TypeError, KeyError, ValueError, IndexError) as error:
        raise PeerError(f"the other side sent an order that can't be read: {error}") from error
    if not isinstance(order, _ORDERS):
        raise PeerError(f"the other side sent {type(order).__name__} as an order")
    return order


def _plain(value: Any, arrays: list[np.ndarray]) -> Any:
    """Arrays as {"array": index}, orders and their parts as {"is": name, "fields": [...]}."""
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {"array": len(arrays) - 1}
    name = type(value).__name__
    if name in _KINDS:
        return {"is": name, "fields": [_plain(getattr(value, field), arrays) for field in _FIELDS[name]]}
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
    return _KINDS[value["is"]](*[_made(each, arrays) for each in value["fields"]])
