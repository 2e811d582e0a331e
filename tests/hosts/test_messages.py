"""Orders arrive as they were sent."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jaxcb.errors import PeerError
from jaxcb.hosts.messages import pack, unpack
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

NUMBERS = np.arange(5, dtype=np.int32)
MOVES = PageMoves(out=[(1, 2)], copies=[(3, 4), (5, 6)])
BUCKET = Bucket(8, 4, False)
ORDERS: list[Order] = [
    ForwardOrder(
        BUCKET,
        MOVES,
        [[7, 9]],
        [ControlRow(2, NUMBERS)],
        [ProcessorStates(1, [np.asarray(True), np.ones((2, 3))], NUMBERS, 2)],
        NUMBERS[::2],
    ),
    ForwardOrder(BUCKET, None, [], [], [], NUMBERS),
    SampleOrder(BUCKET, Tier.GREEDY, 3, [], None, [], None),
    SampleOrder(
        BUCKET,
        Tier.FULL,
        3,
        [False, True],
        RowMasks([0], np.full((1, 9), -1, np.int32)),
        [PromptRows(NUMBERS, NUMBERS + 1, 2, True)],
        PooledRows(NUMBERS, NUMBERS[:2]),
    ),
    MoveOrder(MOVES),
    PagesOrder("drop"),
]


def plain(value: Any) -> Any:
    """Comparable: arrays as lists with their dtype, tuples and lists alike."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.tolist()
    if isinstance(value, Tier):
        return type(value), int(value)
    if isinstance(value, PageMoves | Bucket):
        return type(value), [plain(getattr(value, name)) for name in value.__dataclass_fields__]
    if isinstance(value, list | tuple):
        return [type(value).__name__ if hasattr(value, "_fields") else "", *map(plain, value)]
    return value


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_an_order_arrives_as_it_was_sent(order: Order):
    came = unpack(*pack(order))
    assert plain(came) == plain(order)
    assert jax.tree.structure(came) == jax.tree.structure(order)


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"order": {"is": "Runner", "fields": []}, "arrays": []},
        {"order": {"is": "Bucket", "fields": [1, 1, True]}, "arrays": []},
        {"order": {"is": "PagesOrder", "fields": []}, "arrays": []},
        {"order": {"is": "MoveOrder", "fields": [{"array": 0}]}, "arrays": [["<i4", [1000]]]},
    ],
)
def test_what_is_no_order_is_refused(message: dict[str, Any]):
    with pytest.raises(PeerError, match="the other side sent"):
        unpack(message, b"1234")
