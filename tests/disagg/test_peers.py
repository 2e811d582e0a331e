"""A peer that is broken, or means ill, loses its connection: no engine fails, and nobody else's request."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxcb.disagg import PromptService
from jaxcb.disagg.connector import connector_of
from jaxcb.disagg.fields import Fields
from jaxcb.disagg.identity import identity_of
from jaxcb.disagg.messages import pack_request, pack_token, unpack_request, unpack_token
from jaxcb.disagg.server import PrefillServer, check_secret
from jaxcb.disagg.shared_memory import SharedMemory
from jaxcb.disagg.wire import Channel
from jaxcb.engine.incoming import FirstToken
from jaxcb.errors import ConfigError, PeerError, RequestError
from jaxcb.logprobs import Logprobs
from jaxcb.request import Request, SamplingParams
from jaxcb.structured_outputs import StructuredOutputs
from tests.disagg.peer import NESTED, FakeDecode, FakePrefill, fake_prefill, raw, request_of
from tests.disagg.run import answers, assert_nothing_is_held, keep_roles, linked, serving, tokens_of, wait_for

PATIENT = {"silence_s": 600.0}
"""Who is dropped is not so for his silence."""
PROMPT = [(7 * j * j + 3 * j) % 250 for j in range(500)]
"""32 pages, in four chunks."""
GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)


@pytest.fixture(autouse=True)
def roles_are_kept(monkeypatch) -> None:
    keep_roles(monkeypatch)


# ---------------------------------------------------------------------- a decode process, seen from the prefill engine


def begin(peer: FakeDecode, name: str = "a", prompt: list[int] = PROMPT, **changes: Any) -> None:
    fields, body = request_of(name, prompt)
    first_page = changes.pop("first_page", None)
    peer.tell("begin", changes.pop("body", body), request=fields | changes, first_page=first_page)


ORDERS = {
    "no kind": lambda peer: peer.tell(None),
    "another kind": lambda peer: peer.tell("dance"),
    "nested": lambda peer: peer.tell_raw(NESTED),
    "no object": lambda peer: peer.tell_raw(raw(b"[1]")),
    "an id that is none": lambda peer: peer.tell("drop", id=["a"]),
    "an ack of nothing": lambda peer: peer.tell("received", id="a", num_pages=1),
    "an ack of no pages": lambda peer: peer.tell("received", id="a", num_pages=0),
    "a page that is none": lambda peer: peer.tell("grant", id="a", first_page="0"),
    "a page below zero": lambda peer: peer.tell("grant", id="a", first_page=-1),
    "a page beyond the prompt": lambda peer: (begin(peer), peer.tell("grant", id="a", first_page=33)),
    "a second grant": lambda peer: (begin(peer, first_page=0), peer.tell("grant", id="a", first_page=0)),
    "no request": lambda peer: peer.tell("begin", request="a", first_page=0),
    "half a token": lambda peer: begin(peer, body=b"123"),
    "a tenant that is none": lambda peer: begin(peer, tenant=["a"]),
    "a priority that is none": lambda peer: begin(peer, priority="high"),
    "an endless age": lambda peer: begin(peer, age_s=float("inf")),
    "sampling of another version": lambda peer: begin(peer, sampling={"luck": 1}),
}


@pytest.mark.parametrize("order", ORDERS)
def test_orders_that_make_no_sense_cost_a_decode_process_its_connection(prefill, order):
    with serving(prefill, **PATIENT) as server:
        peer = FakeDecode(prefill, server.address)
        wait_for(lambda: server.num_peers == 1)
        ORDERS[order](peer)
        assert peer.is_dropped()
        wait_for(lambda: server.num_peers == 0)
        assert prefill.healthy
        assert_nothing_is_held(prefill)


def test_acks_out_of_turn_are_none(prefill):
    with serving(prefill, **PATIENT) as server:
        peer = FakeDecode(prefill, server.address)
        begin(peer, first_page=0)
        pages = peer.hear("pages")
        peer.tell("received", id="a", num_pages=pages["num_pages"] + 1)
        assert peer.is_dropped()
        assert_nothing_is_held(prefill)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sampling": {"temperature": -1}}, "temperature must be in"),
        ({"sampling": {"max_tokens": "many"}}, "max_tokens must be an integer"),
        ({"prompt": [9999]}, "token id 9999"),
        ({"prompt": []}, "no tokens"),
        ({"id": ""}, "request_id"),
        ({"priority": 1e300}, "priority must be in"),
        ({"first_page": 33}, "has 32 pages, 33 are there"),
    ],
)
def test_a_request_that_can_not_be_fails_alone(prefill, changes, words):
    with serving(prefill) as server:
        peer = FakeDecode(prefill, server.address)
        begin(peer, **changes)
        assert words in peer.hear("failed")["reason"]
        begin(peer, "b", first_page=0)
        while (message := peer.channel.receive()[0])["kind"] != "first_token":
            if message["kind"] == "pages":
                peer.tell("received", id="b", num_pages=message["num_pages"])
        assert message["id"] == "b"
        wait_for(lambda: prefill.stats().num_running == 0)


def test_an_id_in_use_is_refused_and_its_pages_come_back(prefill):
    with serving(prefill) as server:
        peer = FakeDecode(prefill, server.address)
        begin(peer)
        peer.hear("first_token")
        begin(peer, prompt=PROMPT[:100])
        assert "in use" in peer.hear("failed")["reason"]
        peer.channel.close()


def test_a_stranger_can_send_little_before_he_is_known(prefill):
    with serving(prefill, **PATIENT) as server:
        sock = socket.create_connection(server.address)
        channel = Channel(sock, 10.0)
        channel.receive()
        sock.sendall(raw(b"[" * 70_000)[:100])  # only its head matters
        with pytest.raises(PeerError, match=r"closed the connection|broke"):
            channel.receive()


def test_a_stranger_who_says_a_little_now_and_then_is_not_listened_to_forever(prefill):
    with serving(prefill, silence_s=0.3) as server:
        with socket.create_connection(server.address) as sock, pytest.raises(OSError):
            sock.sendall(raw(b" " * 60_000)[:16])
            deadline = time.monotonic() + 10.0
            while time.monotonic() < deadline:
                sock.sendall(b" ")
                time.sleep(0.05)
        wait_for(lambda: not server._channels)


def test_strangers_that_say_nothing_are_only_so_many(prefill, monkeypatch):
    monkeypatch.setattr("jaxcb.disagg.server.MAX_STRANGERS", 2)
    with serving(prefill, **PATIENT) as server:
        known = FakeDecode(prefill, server.address)
        wait_for(lambda: server.num_peers == 1)
        silent = [Channel(socket.create_connection(server.address), 10.0) for _ in range(2)]
        for channel in silent:
            channel.receive()
        with pytest.raises(PeerError):
            Channel(socket.create_connection(server.address), 10.0).receive()
        silent[0].close()
        wait_for(lambda: len(server._channels) == 2)
        other = FakeDecode(prefill, server.address)
        wait_for(lambda: server.num_peers == 2)
        begin(known, first_page=0)
        known.hear("first_token")
        for peer in (known, other):
            peer.channel.close()


# ---------------------------------------------------------------------- a prefill process, seen from the decode engine


def pages(fake: FakePrefill, order: dict[str, Any], first_page: Any = 0, num_pages: Any = 32, **changes: Any) -> None:
    ticket = fake.send_pages(32)
    message = {"id": order["request"]["id"], "first_page": first_page, "num_pages": num_pages, "ticket": ticket}
    fake.tell("pages", **(message | changes))


def token(
    fake: FakePrefill, order: dict[str, Any], token_id: Any = 7, cached: Any = 0, body: bytes = b"", **more: Any
) -> None:
    fields = {"token_id": token_id, "num_cached_tokens": cached, **more}
    fake.tell("first_token", body, id=order["request"]["id"], token=fields)


PARCELS = {
    "another kind": lambda fake, order: fake.tell("dance", id="a"),
    "nested": lambda fake, order: fake.tell_raw(NESTED),
    "pages out of order": lambda fake, order: pages(fake, order, first_page=1, num_pages=31),
    "pages twice": lambda fake, order: (pages(fake, order), pages(fake, order)),
    "too many pages": lambda fake, order: pages(fake, order, num_pages=33),
    "no pages": lambda fake, order: pages(fake, order, num_pages=0),
    "a place that there isn't": lambda fake, order: pages(fake, order, ticket={"place": 8}),
    "a place below zero": lambda fake, order: pages(fake, order, ticket={"place": -1}),
    "no ticket": lambda fake, order: pages(fake, order, ticket=None),
    "a token of no vocabulary": lambda fake, order: token(fake, order, 264),
    "a token below zero": lambda fake, order: token(fake, order, -1),
    "a token that is none": lambda fake, order: token(fake, order, "7"),
    "more tokens found than there are": lambda fake, order: token(fake, order, cached=501),
    "log-probabilities that nobody wants": lambda fake, order: token(fake, order, body=bytes(20), alternatives=1),
    "log-probabilities cut short": lambda fake, order: token(fake, order, body=bytes(19), alternatives=1),
    "a load that is none": lambda fake, order: fake.tell("beat", backlog_tokens=-1, works=True),
    "a state that is none": lambda fake, order: fake.tell("beat", backlog_tokens=0, works="yes"),
    "a reason that is none": lambda fake, order: fake.tell("failed", id="a", reason=3),
}


@pytest.mark.parametrize("parcel", PARCELS)
def test_parcels_that_make_no_sense_cost_a_prefill_process_its_connection(decode, plain, parcel, monkeypatch):
    monkeypatch.setattr("jaxcb.disagg.remote.RECONNECT_S", 60.0)
    expected = tokens_of(answers(plain, [PROMPT], [GREEDY]))
    with fake_prefill(decode, PARCELS[parcel]) as fake, linked(decode, fake.address, **PATIENT) as front:
        [link] = front.links
        assert tokens_of(answers(front, [PROMPT], [GREEDY])) == expected
        wait_for(lambda: not link.alive)
        assert decode.healthy and link.backlog_tokens == 0


@pytest.mark.parametrize("forbidden", [ord("z"), 2], ids=["forced otherwise", "not of the grammar"])
def test_a_first_token_that_the_grammar_forbids_is_not_taken(decode, plain, forbidden, monkeypatch):
    monkeypatch.setattr("jaxcb.disagg.remote.RECONNECT_S", 60.0)
    regex = "abc[de]+" if forbidden == ord("z") else "[ab]{3}c+d"
    sampling = SamplingParams(max_tokens=12, temperature=0, structured_outputs=StructuredOutputs(regex=regex))
    expected = tokens_of(answers(plain, [PROMPT], [sampling]))

    def script(fake: FakePrefill, order: dict[str, Any]) -> None:
        token(fake, order, forbidden)

    with fake_prefill(decode, script) as fake, linked(decode, fake.address, **PATIENT) as front:
        assert tokens_of(answers(front, [PROMPT], [sampling])) == expected
        wait_for(lambda: not front.links[0].alive)


def test_a_second_first_token_ends_the_connection_and_the_answer_goes_on_after_the_first(decode, monkeypatch):
    monkeypatch.setattr("jaxcb.disagg.remote.RECONNECT_S", 60.0)

    def script(fake: FakePrefill, order: dict[str, Any]) -> None:
        token(fake, order, 7)
        token(fake, order, 8)

    with fake_prefill(decode, script) as fake, linked(decode, fake.address, **PATIENT) as front:
        [[output]] = answers(front, [PROMPT], [GREEDY])
        assert output.token_ids[0] == 7 and len(output.token_ids) == 10
        wait_for(lambda: not front.links[0].alive)


def test_a_link_outlives_whatever_goes_wrong_when_it_connects_again(prefill, decode, plain, monkeypatch):
    monkeypatch.setattr("jaxcb.disagg.remote.RECONNECT_S", 0.02)
    expected = tokens_of(answers(plain, [PROMPT], [GREEDY]))
    with serving(prefill) as server, linked(decode, server.address) as front:
        [link] = front.links
        tries = []

        def fails(offer, rows):
            tries.append(offer)
            raise RuntimeError("no memory")

        with monkeypatch.context() as patch:
            patch.setattr(link._connector, "receiver", fails)
            link._session.channel.close()
            wait_for(lambda: len(tries) > 2)
            assert not link.alive
        wait_for(lambda: link.alive)
        totals = decode.handovers.incoming.totals.requests
        assert tokens_of(answers(front, [PROMPT], [GREEDY])) == expected
        assert decode.handovers.incoming.totals.requests == totals + 1


def test_what_can_not_be_sent_is_computed_by_the_decode_engine(prefill, decode, plain, monkeypatch):
    def refuses(request: Request) -> tuple[dict[str, Any], bytes]:
        raise TypeError("it can't be said") if len(request.prompt_token_ids) == 500 else RequestError("nor this")

    monkeypatch.setattr("jaxcb.disagg.messages.pack_request", refuses)
    prompts, sampling = [PROMPT, PROMPT[:300]], [GREEDY] * 2
    with serving(prefill) as server, linked(decode, server.address) as front:
        assert tokens_of(answers(front, prompts, sampling)) == tokens_of(answers(plain, prompts, sampling))
        assert front.links[0].alive and front.links[0].backlog_tokens == 0


# ---------------------------------------------------------------------- doors


def test_the_port_of_a_server_that_was_closed_is_free_at_once(prefill):
    with serving(prefill) as server:
        FakeDecode(prefill, server.address)
        idle = socket.create_connection(server.address)  # never says a word
        address = server.address
    again = PrefillServer(PromptService(prefill), identity_of(prefill, "shm"), connector_of("shm"), address)
    assert again.address == address
    again.close()
    idle.close()
    with pytest.raises(OSError):
        socket.create_connection(address, timeout=1.0)


def test_a_connection_that_can_not_be_accepted_does_not_close_the_door(prefill, monkeypatch):
    with serving(prefill) as server:
        accept, failures = socket.socket.accept, []

        def fails_once(sock):
            if not failures:
                failures.append(accept(sock))
                raise OSError("too many open files")
            return accept(sock)

        monkeypatch.setattr(socket.socket, "accept", fails_once)
        for _ in range(2):
            socket.create_connection(server.address).close()
        wait_for(lambda: bool(failures))
        FakeDecode(prefill, server.address).channel.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_what_only_this_machine_reaches_needs_no_secret(host):
    check_secret(host, "")


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "fe80::1", "myhost"])
def test_what_others_reach_needs_a_secret(host):
    check_secret(host, "word")
    with pytest.raises(ConfigError, match=r"reached by other machines: without --kv-secret") as error:
        check_secret(host, "")
    assert error.value.param == "kv_secret"


def test_a_server_on_an_address_that_others_reach_needs_a_secret(prefill):
    with pytest.raises(ConfigError, match="kv-secret"):
        PrefillServer(PromptService(prefill), {}, connector_of("shm"), ("0.0.0.0", 0))


def test_a_message_that_went_out_in_part_is_the_last_one():
    ours, theirs = socket.socketpair()
    channel = Channel(ours, 0.05)
    with pytest.raises(PeerError, match="can't be reached"):
        channel.send({}, bytes(32 << 20))
    theirs.settimeout(0.2)
    with contextlib.suppress(TimeoutError):
        while theirs.recv(1 << 20):
            pass
    with pytest.raises(PeerError):
        channel.send({})
    theirs.close()


def test_shared_memory_that_somebody_left_behind_goes_and_what_is_offered_stays(decode):
    directory = Path("/dev/shm")
    old, new = directory / "jaxcb-kv-test-old", directory / "jaxcb-kv-test-new"
    for file in (old, new):
        file.touch()
    os.utime(old, (time.time() - 61, time.time() - 61))
    SharedMemory().sender(decode.handovers.page_rows).close()
    assert not old.exists() and new.exists()
    new.unlink()


def test_only_files_of_shared_memory_are_opened(tmp_path, decode):
    file = tmp_path / "jaxcb-kv-x"
    file.write_bytes(b"1")
    for offer in ({"file": str(file)}, {"file": "/dev/shm/../etc/jaxcb-kv-x"}, {"file": "/dev/shm/other"}, {}):
        with pytest.raises(ConfigError, match="no shared memory of jaxcb's"):
            SharedMemory().receiver(offer, decode.handovers.page_rows)


# ---------------------------------------------------------------------- messages


@pytest.mark.parametrize("value", [(1, 2), {1: "a"}, b"a", np.float32(1), {"a": [{"b": (1,)}]}, {1, 2}])
def test_extra_args_that_would_arrive_as_something_else_are_not_sent(value):
    sampling = SamplingParams(extra_args={"ok": 1, "odd": value})
    with pytest.raises(RequestError, match="extra_args") as error:
        pack_request(Request(request_id="a", prompt_token_ids=[1], sampling=sampling))
    assert error.value.param == "extra_args"


def test_a_request_arrives_as_it_was_sent():
    sampling = SamplingParams(
        max_tokens=9,
        temperature=0.3,
        seed=-5,
        stop=["x"],
        stop_token_ids=[4],
        logit_bias={5: 3.5},
        bad_words=["a"],
        allowed_token_ids=[1, 2],
        structured_outputs=StructuredOutputs(json={"type": "object"}, disable_any_whitespace=True),
        extra_args={"a": [1, 2.5, None, {"b": "c"}], "d": True},
    )
    request = Request(
        request_id="a",
        prompt_token_ids=[3, 1, 2],
        sampling=sampling,
        arrival_s=time.monotonic() - 5.0,
        priority=np.float32(-2.5),
        tenant="t",
        ttft_deadline_s=np.float32(0.25),
        cache_salt="s",
    )
    fields, body = pack_request(request)
    arrived = unpack_request(Fields(json.loads(json.dumps(fields))), body)
    assert arrived.arrival_s == pytest.approx(request.arrival_s, abs=1.0)
    assert (arrived.sampling, arrived.prompt_token_ids) == (sampling, request.prompt_token_ids)
    for name in ("request_id", "priority", "tenant", "ttft_deadline_s", "cache_salt"):
        assert getattr(arrived, name) == getattr(request, name)


def test_a_first_token_arrives_as_it_was_sent():
    ids, values = np.array([7], np.int32), np.array([-0.5], np.float32)
    logprobs = Logprobs(ids, values, np.array([2], np.int32), np.array([[3, 7]], np.int32), np.array([[-0.1, -0.5]]))
    fields, body = pack_token(FirstToken(7, 3, logprobs))
    arrived = unpack_token(Fields(fields), body)
    assert (arrived.token_id, arrived.num_cached_tokens) == (7, 3)
    for name in ("token_ids", "logprobs", "ranks", "top_ids", "top_logprobs"):
        np.testing.assert_allclose(getattr(arrived.logprobs, name), getattr(logprobs, name))
    assert unpack_token(Fields({"token_id": 7, "num_cached_tokens": 3}), b"").logprobs is None
