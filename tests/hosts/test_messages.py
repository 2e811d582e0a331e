"""Orders arrive as they were sent."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxcb.disagg import wire
from jaxcb.disagg.wire import Channel
from jaxcb.errors import PeerError
from jaxcb.hosts import link
from jaxcb.hosts.link import Link
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
        NUMBERS[::2],
        [[7, 9]],
        MOVES,
        [ControlRow(2, NUMBERS)],
        [ProcessorStates(1, [np.asarray(True), np.ones((2, 3)), np.ones(3, ml_dtypes.bfloat16)], NUMBERS, 2)],
    ),
    ForwardOrder(BUCKET, NUMBERS, [], None, [], []),
    SampleOrder(BUCKET, Tier.GREEDY, 3, [], prompts=[]),
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


def test_numbers_of_another_machine_arrive_as_the_same_numbers():
    states = [np.arange(3, dtype=">f4")]
    order = ForwardOrder(BUCKET, NUMBERS, [], None, processors=[ProcessorStates(1, states, NUMBERS, 2)])
    [came] = unpack(*pack(order)).processors[0].states
    assert (came.dtype, came.tolist()) == (np.dtype("float32"), [0.0, 1.0, 2.0])


def test_pages_take_no_room_in_the_json_part():
    pairs = [(index, index + 1) for index in range(2**17, 2**17 + 10_000)]
    order = ForwardOrder(BUCKET, NUMBERS, pairs, PageMoves(into=pairs))
    fields, body = pack(order)
    assert len(json.dumps(fields)) < 1000
    assert plain(unpack(fields, body)) == plain(order)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Link, Link]]:
    """Both ends of a link, which beat all the time."""
    monkeypatch.setattr(link, "BEAT_S", 0.001)
    ends = [Link(Channel(sock, 10.0), "the other") for sock in socket.socketpair()]
    yield ends[0], ends[1]
    for end in ends:
        end.close()


def test_an_order_that_is_larger_than_a_message_may_be_arrives_in_pieces(pair, monkeypatch):
    """As of many newcomers with penalties and long contexts. Beats go on between the pieces."""
    monkeypatch.setattr(wire, "MAX_BODY_BYTES", 1000)
    monkeypatch.setattr(link, "PIECE_BYTES", 1000)
    row = np.arange(1250, dtype=np.int32)
    for count in (40, 0, 1):
        order = ForwardOrder(BUCKET, NUMBERS, [], None, [ControlRow(slot, row) for slot in range(count)])
        fields, body = pack(order)
        sent = threading.Thread(target=pair[0].send, args=("order", body), kwargs=fields)
        sent.start()
        assert plain(unpack(*pair[1].receive("order"))) == plain(order)
        sent.join()


def test_who_sends_too_much_learns_it_and_may_go_on(monkeypatch):
    monkeypatch.setattr(wire, "MAX_BODY_BYTES", 1000)
    monkeypatch.setattr(wire, "MAX_JSON_BYTES", 100)
    ours, theirs = (Channel(sock, 10.0) for sock in socket.socketpair())
    for message, body, words in (({}, bytes(1001), "1,001 bytes of a body"), ({"a": "b" * 100}, b"", "of JSON")):
        with pytest.raises(PeerError, match=words):
            ours.send(message, body)
    ours.send({"a": "b"}, bytes(1000))
    assert theirs.receive() == ({"a": "b"}, bytes(1000))
    for channel in (ours, theirs):
        channel.close()
