"""Hosts that don't fit, or don't come, are refused at the start, with the reason on both sides."""

from __future__ import annotations

import importlib
import re
import socket
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest

from jaxcb.config import EngineConfig
from jaxcb.devices import Placement
from jaxcb.disagg.identity import difference
from jaxcb.disagg.wire import Channel, address_of
from jaxcb.engine import Engine
from jaxcb.engine.sizing import resolve_config
from jaxcb.errors import ConfigError, PeerError
from jaxcb.hosts import follow, follower, identity, leader, link, start
from jaxcb.hosts.group import devices_of
from jaxcb.hosts.leader import Leader
from jaxcb.hosts.prepared import sizes_of
from tests.engine.conftest import SPEC
from tests.engine.test_logits_processors import PROCESSORS
from tests.hosts.run import free_address

starting = importlib.import_module("jaxcb.hosts.start")  # the module, which the package's function hides


def config_of(rank: int, address: str, **changes: Any) -> EngineConfig:
    settings = {"tensor_parallel_size": 2, "nnodes": 2, "dist_timeout_s": 20.0} | changes
    return EngineConfig(node_rank=rank, dist_init_addr=address, **settings)


def errors_of(address: str, first: EngineConfig, second: EngineConfig) -> list[str]:
    """What both say."""
    with ThreadPoolExecutor() as threads:
        tries = [threads.submit(start, first, progress=False), threads.submit(follow, second, progress=False)]
        return [str(each.exception(30)) for each in tries]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor_parallel_size": 4}, "numbers of devices (--tensor-parallel-size): '2' here, '4' there"),
        ({"enable_expert_parallel": True}, "ways to share experts out (--enable-expert-parallel): 'False' here"),
    ],
)
def test_other_shares_are_refused_on_both_sides(changes: dict[str, Any], words: str):
    address = free_address()
    for error in errors_of(address, config_of(0, address), config_of(1, address, **changes)):
        assert f"different {words}" in error


@pytest.mark.parametrize("name", identity.program_of(EngineConfig()))
def test_other_programs_are_refused_on_both_sides(name: str, monkeypatch: pytest.MonkeyPatch):
    ours, address = identity.program_of, free_address()
    monkeypatch.setattr(leader, "program_of", lambda config: ours(config) | {name: "9.9"})
    reason = f"host 0 (here) and host 1 (there): the two sides have different {identity.WORDS[name]}: '9.9' here"
    for error in errors_of(address, config_of(0, address), config_of(1, address)):
        assert reason in error


def test_a_rank_that_is_taken_or_not_there_is_refused_on_both_sides():
    address = free_address()
    for error in errors_of(address, config_of(0, address), config_of(2, address, nnodes=2 + 1, tensor_parallel_size=3)):
        assert "different numbers of hosts" in error
    address = free_address()
    three = {"nnodes": 3, "tensor_parallel_size": 3}
    with ThreadPoolExecutor() as threads:
        first = threads.submit(start, config_of(0, address, **three))
        others = [threads.submit(follow, config_of(1, address, **three)) for _ in range(2)]
        for each in (first, *others):
            assert "a host came with --node-rank 1" in str(each.exception(30))


def connected(address: str) -> socket.socket:
    """To the first host, once it listens."""
    while True:
        try:
            return socket.create_connection(address_of(address, ""), 10)
        except ConnectionRefusedError:
            time.sleep(0.01)


def is_left(sock: socket.socket) -> bool:
    """The other side has closed it, and not for want of a word."""
    sock.settimeout(link.SILENCE_S / 3)
    return sock.recv(1) == b""


def joined(address: str, **changes: Any) -> Channel:
    """A host that has met the first one, as it sees it."""
    channel = Channel(connected(address), 10)
    channel.send({"kind": "join", "rank": 1, "identity": identity.program_of(config_of(1, address, **changes))})
    return channel


def next_of(channel: Channel, kind: str) -> dict[str, Any]:
    while (message := channel.receive()[0])["kind"] != kind:
        assert message["kind"] == "beat"
    return message


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("weights", "weights of the model"),
        ("spec", "models"),
        ("device", "kinds of devices"),
        ("settings", "settings .backend, dtype"),
    ],
)
def test_another_model_or_device_is_refused_on_both_sides(name: str, words: str):
    address, model = free_address(), {"device": "cpu", "spec": "a", "weights": "b", "settings": "c"}
    with ThreadPoolExecutor() as threads:
        made = threads.submit(Leader, config_of(0, address))
        channel = joined(address)
        first = made.result(30)
        channel.send({"kind": "loaded", "identity": model | {name: "other"}, "num_kv_pages": 9})
        heard = threads.submit(next_of, channel, "failed")
        heard.add_done_callback(lambda _: channel.close())
        reason = f"host 1 .there.: the two sides have different {words}"
        with pytest.raises(ConfigError, match=reason), first.saying_why():
            first.agree(model, 12)
        assert re.search(words, heard.result(30)["reason"])


SMALL: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
    "decode_buckets": (8,),
    "mixed_buckets": (64,),
    "host_kv_gib": 0.01,
}


def resolved(num_kv_pages: int = 100, **changes: Any) -> EngineConfig:
    return resolve_config(EngineConfig(num_kv_pages=num_kv_pages, **(SMALL | changes)), SPEC, np.dtype("float32"))


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_seqs": 4},
        {"max_num_batched_tokens": 32, "mixed_buckets": (32,)},
        {"max_model_len": 128},
        {"page_size": 8},
        {"decode_buckets": (4, 8)},
        {"mixed_buckets": (32, 64)},
        {"host_kv_gib": 0.02},
        {"kv_transfer": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_host_with_other_sizes_gives_up_with_the_reason(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    """Of what it resolves for the number of pages that all agree on."""
    sent: list[str] = []
    sizes = {"num_kv_pages": 100, "sizes": sizes_of(resolved())}
    link: Any = types.SimpleNamespace(send=lambda kind, **_: sent.append(kind), receive=lambda *_: (sizes, b""))
    prepared = types.SimpleNamespace(
        identity={}, num_kv_pages=120, resolved=lambda num_kv_pages: resolved(num_kv_pages, **changes)
    )
    monkeypatch.setattr(follower, "prepare", lambda *_, **__: prepared)
    with pytest.raises(ConfigError, match=r"host 1 \(here\) and host 0 .* different sizes of steps and pages"):
        follower._ready(config_of(1, "a:1"), link, progress=False)
    assert sent == ["loaded"], "and not ready"


@pytest.mark.parametrize(
    "changes",
    [
        {"deterministic": True},
        {"logprobs_mode": "processed"},
        {"dtype": "bfloat16"},
        {"backend": "triton"},
        {"logits_processors": PROCESSORS},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_settings_that_make_other_programs_are_a_difference(changes: dict[str, Any]):
    settings = {"backend": "xla", "dtype": "float32"}
    placement = Placement((jax.local_devices()[0],))
    ours, theirs = (
        identity.model_of(SPEC, identity.Weights(), EngineConfig(**(settings | more)), placement)
        for more in ({}, changes)
    )
    reason = difference(ours, theirs, identity.WORDS)
    assert reason is not None and "different settings (backend, dtype" in reason


def test_every_host_has_room_for_the_pages_that_all_take():
    address, model = free_address(), {"spec": "a"}
    with ThreadPoolExecutor() as threads:
        made = threads.submit(Leader, config_of(0, address))
        channel = joined(address)
        first = made.result(30)
        channel.send({"kind": "loaded", "identity": model, "num_kv_pages": 9})
        assert first.agree(model, 12) == 9
        first.set_sizes(9, {"sizes": "nine"})
        assert next_of(channel, "sizes") == {"kind": "sizes", "num_kv_pages": 9, "sizes": {"sizes": "nine"}}
        lost = threading.Event()
        first.watch(lambda reason: lost.set())
        channel.close()
        assert lost.wait(10)


def test_a_host_whose_first_host_dies_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch):
    """Wherever it is: here it waits for jax."""
    address, ended, reasons = free_address(), threading.Event(), []

    def end(reason: str) -> None:
        reasons.append(reason)
        ended.set()

    def wait_for_jax(*_: Any) -> None:
        assert ended.wait(20)
        raise ConfigError("it was in vain")

    monkeypatch.setattr(follower, "_end", end)
    monkeypatch.setattr(follower, "join", wait_for_jax)
    host, port = address_of(address, "")
    with ThreadPoolExecutor() as threads, socket.create_server((host, port)) as sock:
        second = threads.submit(follow, config_of(1, address))
        channel = Channel(sock.accept()[0], 10)
        assert next_of(channel, "join")["rank"] == 1
        channel.send({"kind": "welcome", "coordinator": "nowhere:1"})
        channel.close()
        second.result(30)
    assert reasons[0] == "host 0 is lost: the other side closed the connection"


@pytest.mark.parametrize("rank", [0, 1])
def test_who_does_not_come_is_not_waited_for_forever(rank: int):
    config = config_of(rank, free_address(), dist_timeout_s=0.3)
    message = "--node-rank 1 did not come to .* within 0.3 s" if rank == 0 else "nobody can be reached at .* within 0.3"
    with pytest.raises(ConfigError, match=message):
        (follow if rank else start)(config)


def test_a_stranger_keeps_nobody_from_meeting():
    address = free_address()
    with ThreadPoolExecutor() as threads:
        made = threads.submit(Leader, config_of(0, address))
        with connected(address) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        channel = joined(address)
        made.result(30)
        channel.close()


def test_a_host_that_is_told_to_stop_may_be_left():
    """What comes then, the end of the connection too, is no failure."""
    ours, theirs = (link.Link(Channel(sock, 10), "host 0") for sock in socket.socketpair())
    lost: list[str] = []
    theirs.read_ahead(lost.append)
    ours.send("stop")
    ours.close()
    assert theirs.receive("stop")[0] == {"kind": "stop"}
    theirs.join(10)
    theirs.close()
    assert not lost


def test_a_stranger_who_says_nothing_keeps_nobody_waiting():
    address = free_address()
    with ThreadPoolExecutor() as threads:
        made = threads.submit(Leader, config_of(0, address))
        silent = [connected(address) for _ in range(3)]
        begun_s = time.monotonic()
        channel = joined(address)
        made.result(30)
        assert time.monotonic() - begun_s < link.SILENCE_S / 2
        assert [is_left(sock) for sock in silent] == [True] * 3, "and he is not kept"
        channel.close()


def test_a_host_that_is_lost_before_all_have_met_ends_the_meeting_at_once():
    address, three = free_address(), {"nnodes": 3, "tensor_parallel_size": 3}
    with ThreadPoolExecutor() as threads:
        made = threads.submit(Leader, config_of(0, address, **three))
        joined(address, **three).close()
        assert "host 1 is lost" in str(made.exception(10))


def test_a_host_that_is_lost_when_it_is_told_something_is_named():
    address = free_address()
    with ThreadPoolExecutor() as threads:
        made = threads.submit(Leader, config_of(0, address))
        joined(address).close()
        first = made.result(30)
        with pytest.raises(ConfigError, match=r"lost|reached"), first.saying_why():
            while True:  # until the system knows it too
                first.set_sizes(9, {})


@pytest.mark.parametrize("waits_in", ["join", "prepare"])
def test_a_host_that_is_lost_while_jax_waits_for_it_is_named_at_once(waits_in: str, monkeypatch: pytest.MonkeyPatch):
    address, over = free_address(), threading.Event()
    monkeypatch.setattr(leader, "join", lambda *_: None)
    monkeypatch.setattr(leader if waits_in == "join" else starting, waits_in, lambda *_, **__: over.wait(20))
    with ThreadPoolExecutor() as threads:
        first = threads.submit(start, config_of(0, address))
        channel = joined(address)
        next_of(channel, "welcome")
        channel.close()
        assert "host 1 is lost" in str(first.exception(10))
    over.set()


@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_stays_behind_of_a_start_that_fails(rank: int, monkeypatch: pytest.MonkeyPatch):
    before, address = set(threading.enumerate()), free_address()
    host, port = address_of(address, "")
    if rank:
        with ThreadPoolExecutor() as threads, socket.create_server((host, port)) as sock:
            second = threads.submit(follow, config_of(1, address))
            channel = Channel(sock.accept()[0], 10)
            next_of(channel, "join")
            channel.send({"kind": "failed", "reason": "not today"})
            assert "host 0 gives up: not today" in str(second.exception(10))
            with pytest.raises(PeerError, match=r"closed|broke"):
                while True:
                    channel.receive()
    else:
        three = {"nnodes": 3, "tensor_parallel_size": 3}
        with ThreadPoolExecutor() as threads:
            first = threads.submit(start, config_of(0, address, dist_timeout_s=1.0, **three))
            silent, channel = connected(address), joined(address, **three)
            heard = threads.submit(next_of, channel, "failed")
            heard.add_done_callback(lambda _: channel.close())
            assert "--node-rank 2 did not come" in str(first.exception(20))
            assert is_left(silent)
        socket.create_server((host, port)).close()
    assert not [thread for thread in threading.enumerate() if "host" in thread.name and thread not in before]


def test_an_engine_that_was_made_in_vain_is_shut_down(monkeypatch: pytest.MonkeyPatch):
    """Two hosts have met, and then the second can't make itself ready."""
    address, ended = free_address(), []
    monkeypatch.setattr(leader, "join", lambda *_: None)
    monkeypatch.setattr(leader.jax.distributed, "shutdown", lambda: pytest.fail("it would wait for who is gone"))
    model = types.SimpleNamespace(name="", spec=None, params=None, tokenizer=None, sampling_defaults=None)
    placement = types.SimpleNamespace(devices=())
    prepared = types.SimpleNamespace(identity={}, num_kv_pages=9, model=model, placement=placement)
    monkeypatch.setattr(starting, "prepare", lambda *_, **__: prepared)
    monkeypatch.setattr(starting, "sizes_of", lambda _: {})

    class FakeEngine:
        config = None

        def __init__(self, *_: Any, followers: Leader, **__: Any):
            self._followers = followers

        def compile(self, **_: Any) -> None:
            """Nothing."""

        def shutdown(self) -> None:
            self._followers.close()
            ended.append(True)

    monkeypatch.setattr(starting, "Engine", FakeEngine)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(start, config_of(0, address), progress=False)
        channel = joined(address)
        next_of(channel, "welcome")
        channel.send({"kind": "loaded", "identity": {}, "num_kv_pages": 9})
        next_of(channel, "sizes")
        channel.send({"kind": "failed", "reason": "no memory"})
        heard = threads.submit(next_of, channel, "failed")
        heard.add_done_callback(lambda _: channel.close())
        assert "host 1 gives up: no memory" in str(first.exception(20))
    assert ended == [True]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"dist_init_addr": None}, "dist_init_addr"),
        ({"dist_init_addr": "nowhere"}, "dist_init_addr"),
        ({"nnodes": 1}, "dist_init_addr"),
        ({"node_rank": 2}, "node_rank"),
        ({"node_rank": 1}, "node_rank"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size"),
        ({"data_parallel_size": 2}, "data_parallel_size"),
        ({"kv_transfer": True}, "kv_transfer"),
        ({"nnodes": 0}, "nnodes"),
        ({"dist_timeout_s": -1}, "dist_timeout_s"),
    ],
)
def test_what_cannot_work_is_refused_by_name(changes: dict[str, Any], param: str):
    with pytest.raises(ConfigError) as error:
        start(EngineConfig(**({"tensor_parallel_size": 2, "nnodes": 2, "dist_init_addr": "127.0.0.1:1"} | changes)))
    assert error.value.param == param


def test_more_devices_than_a_host_has_are_refused_with_the_host(monkeypatch: pytest.MonkeyPatch):
    devices = [types.SimpleNamespace(process_index=rank, device_kind="H200") for rank in (0, 0, 1)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    assert devices_of(config_of(0, "a:1")) == (devices[0], devices[2]), "the first of each"
    with pytest.raises(ConfigError, match=r"4 on 2 hosts needs 2 devices of each, host 1 has 1 .H200.") as error:
        devices_of(config_of(0, "a:1", tensor_parallel_size=4))
    assert error.value.param == "tensor_parallel_size"


def test_an_engine_of_one_host_says_how_one_over_several_is_started():
    with pytest.raises(ConfigError, match=r"jaxcb.hosts.start starts one over 2"):
        Engine.start(config_of(0, "a:1"))
