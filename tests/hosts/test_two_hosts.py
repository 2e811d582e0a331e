"""Two processes with two devices each answer as one device does, and neither outlives the other for long."""

from __future__ import annotations

import contextlib
import json
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.hosts.process import save
from tests.hosts.run import Host, free_address, hosts
from tests.parallel.cut import params
from tests.parallel.test_cut import LOGPROBS
from tests.serve.process import REAL, ServerProcess
from tests.serve.real_server import FLAGS, SHARED

SOON_S = 20.0
"""Far less than jax's own timeouts; a busy machine needs some of it."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    file = tmp_path_factory.mktemp("hosts") / "params.pickle"
    save(params(), file)
    address = free_address()
    commands = [("-m", "tests.hosts.process", str(rank), address, str(file)) for rank in range(2)]
    with hosts(commands, devices=2) as started:
        yield started


@pytest.fixture(scope="module")
def said(pair: list[Host]) -> dict[str, Any]:
    return pair[0].read()


def test_answers_are_those_of_one_device(said):
    whole, over_hosts = said["found"]
    for name in ("tokens", "choices", "stopped", "processed", "beams", "cached"):
        assert over_hosts[name] == whole[name], name
    for name, most in (("logprobs", LOGPROBS), ("embedding", 1e-5), ("scores", LOGPROBS * 200)):
        np.testing.assert_allclose(over_hosts[name], whole[name], atol=most, err_msg=name)


def test_prefix_hits_swaps_and_pages_taken_anew_change_nothing(said):
    for found in said["found"]:
        assert found["same again"]
        assert found["same after sleep"]
        assert found["cached"] > 0
        assert found["swaps"] > 0
        assert found["compiles"] == 0


def test_what_several_hosts_cannot_do_is_refused_by_name(said):
    assert said["update_params"] == "update_params is for engines of one host, and this one is on 2"


def test_hosts_stop_with_the_first(pair, said):
    for host in pair:
        assert host.wait(SOON_S) == 0, host.log()


ASKED = [
    {"prompt": "one two three", "max_tokens": 16, "temperature": 0, "logprobs": 2},
    {"prompt": [5, 6, 7] * 30, "max_tokens": 16, "temperature": 1, "seed": 3, "n": 2},
]


def asked(url: str, body: dict[str, Any]) -> Any:
    data = json.dumps(body | {"model": "tiny"}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=60)


def answer(url: str, body: dict[str, Any]) -> dict[str, Any]:
    with asked(url, body) as response:
        return json.load(response)


@contextlib.contextmanager
def server(model_dir: Path) -> Iterator[tuple[ServerProcess, Host]]:
    """Over two hosts with a device each."""
    flags = [*FLAGS, "--tensor-parallel-size", "2", "--nnodes", "2", "--dist-init-addr", free_address()]
    command = [*REAL, str(model_dir), *flags, "--node-rank", "1"]
    with hosts([command]) as [second], ServerProcess(REAL, str(model_dir), *flags) as first:
        yield first, second


@SHARED
def test_the_server_answers_over_two_hosts_and_fails_cleanly_when_one_is_killed(real_server, model_dir):
    with server(model_dir) as (first, second):
        for body in ASKED:
            ours, theirs = answer(first.url, body), answer(real_server.url, body)
            assert [choice["text"] for choice in ours["choices"]] == [choice["text"] for choice in theirs["choices"]]
        long = {"prompt": "a", "max_tokens": 500, "temperature": 0, "ignore_eos": True, "stream": True}
        with asked(first.url, long) as response:
            response.readline()
            second.process.kill()
            begun_s = time.monotonic()
            assert "error" in response.read().decode()
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{first.url}/health")
        assert refused.value.code == 503
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(SOON_S) == 0
        assert time.monotonic() - begun_s < SOON_S


@pytest.mark.slow
@SHARED
def test_a_host_ends_when_the_first_is_killed_amid_a_step(model_dir):
    with server(model_dir) as (first, second):
        long = {"prompt": "a", "max_tokens": 500, "temperature": 0, "ignore_eos": True, "stream": True}
        with asked(first.url, long) as response:
            response.readline()
            first.process.kill()
            assert second.wait(SOON_S) != 0
        assert "host 0 is lost" in second.log() or "another task died" in second.log()
