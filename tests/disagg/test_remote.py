"""Prefill and decode in processes of their own: the same answers, and either may be killed at any moment."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxcb.disagg import PromptService
from jaxcb.disagg.connector import CONNECTORS, connector_of
from jaxcb.disagg.identity import WORDS, difference, identity_of
from jaxcb.disagg.remote import RemoteLink
from jaxcb.disagg.server import PrefillServer
from jaxcb.disagg.wire import Channel
from jaxcb.errors import ConfigError
from jaxcb.request import SamplingParams
from jaxcb.structured_outputs import StructuredOutputs
from tests.disagg.run import (
    PROMPTS,
    SAMPLING,
    answers,
    assert_nothing_is_held,
    keep_roles,
    linked,
    serving,
    tokens_of,
    wait_for,
)
from tests.engine.test_logits_processors import PROCESSORS

LONG = [[(7 * i * j + 3 * j) % 250 for j in range(500)] for i in range(1, 5)]
GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
ROOT = Path(__file__).parents[2]


class Process:
    """One of tests.disagg.process."""

    def __init__(self, *arguments: str):
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "tests.disagg.process", *arguments],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )

    def told(self, name: str) -> int:
        """The next thing that it says under this name."""
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            if name in (said := json.loads(line)):
                return said[name]
        raise AssertionError(f"it ended ({self._popen.wait()}) and never said {name!r}")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._popen.pid, signal.SIGKILL)
        self._popen.wait()


@pytest.fixture(autouse=True)
def roles_are_kept(monkeypatch) -> None:
    keep_roles(monkeypatch)


def test_the_answers_are_those_of_one_engine_whatever_is_asked_for(prefill, decode, plain):
    prompts = [*PROMPTS, *LONG, LONG[1][:150], PROMPTS[3], PROMPTS[5]]
    sampling = [
        *SAMPLING,
        *[GREEDY] * 4,
        SamplingParams(n=2, temperature=0.9, seed=5, max_tokens=8, ignore_eos=True, logprobs=2),
        SamplingParams(max_tokens=30, temperature=0, structured_outputs=StructuredOutputs(regex="[ab]{3}c+d")),
        SamplingParams(max_tokens=9, logit_bias={5: 3.5}, bad_words=["a"], stop=["xyz"], temperature=0),
    ]
    expected = answers(plain, prompts, sampling)
    with serving(prefill) as server, linked(decode, server.address) as front:
        before = decode.handovers.incoming.totals.requests
        given = answers(front, prompts, sampling)
        assert decode.handovers.incoming.totals.requests - before == len(prompts)
    assert tokens_of(given) == tokens_of(expected)
    assert given[12][1].logprobs.top_ids.tolist() == expected[12][1].logprobs.top_ids.tolist()


@pytest.mark.parametrize("connector", CONNECTORS)
def test_a_prefill_process_is_killed_at_every_stage_and_no_answer_differs(decode, plain, connector):
    expected = tokens_of(answers(plain, LONG, [GREEDY] * 4))
    slow = ("--connector", connector, "--delay-s", "0.03")
    process = Process("prefill", "0", *slow)
    port = process.told("port")
    with linked(decode, ("127.0.0.1", port), connector) as front:
        [link] = front.links
        before = decode.handovers.incoming.totals.requests
        assert tokens_of(answers(front, LONG, [GREEDY] * 4)) == expected
        assert decode.handovers.incoming.totals.requests - before == 4
        for stage in ("chunks", "before the ack", "decoding", "before"):
            decode.reset_prefix_cache()
            pages = decode.handovers.incoming.totals.pages
            results: list[list[list[list[int]]]] = []
            answering = threading.Thread(
                target=lambda into=results: into.append(tokens_of(answers(front, LONG, [GREEDY] * 4)))
            )
            answering.start()
            if stage != "before":
                wait_for(lambda pages=pages: decode.handovers.incoming.totals.pages > pages)
                if stage == "before the ack":
                    decode.pause()
                    time.sleep(0.1)
                elif stage == "decoding":
                    wait_for(lambda: decode.stats().num_running > 0)
                process.kill()
                decode.resume()
            answering.join()
            assert results == [expected], stage
            assert_nothing_is_held(decode)
            wait_for(lambda: not link.alive)
            if stage in ("chunks", "before the ack"):  # it is started again, and found
                process = Process("prefill", str(port), *slow)
                process.told("port")
                wait_for(lambda: link.alive)


@pytest.mark.parametrize("connector", ["shm", pytest.param("transfer", marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", ["chunks", "before the ack", "decoding"])
def test_a_decode_process_is_killed_and_the_prefill_engine_frees_its_pages(prefill, stage, connector):
    with serving(prefill, connector) as server:
        no_acks = ["--no-acks"] if stage == "before the ack" else []
        process = Process("decode", str(server.address[1]), "--connector", connector, *no_acks)
        process.told("pages")
        if stage == "before the ack":
            wait_for(lambda: prefill.stats().kv_pages_used > 0 and prefill.idle)
        elif stage == "decoding":
            process.told("tokens")
        process.kill()
        wait_for(lambda: server.num_peers == 0)
        assert_nothing_is_held(prefill)


def test_a_side_that_falls_silent_counts_as_dead(prefill, decode, plain):
    """Both sides, without killing one: the other end of the line is ours and says nothing."""
    with serving(prefill, silence_s=0.2) as server:
        channel = Channel(socket.create_connection(server.address), 10.0)
        assert channel.receive()[0]["kind"] == "hello"
        with pytest.raises(Exception, match="closed the connection"):
            channel.receive()
    with serving(prefill) as server, linked(decode, server.address, silence_s=0.3) as front:
        [link] = front.links
        wait_for(lambda: not link.alive)  # beats come every second: too seldom for it
        assert tokens_of(answers(front, LONG[:1], [GREEDY])) == tokens_of(answers(plain, LONG[:1], [GREEDY]))


def test_sides_that_do_not_fit_are_refused_with_the_reason(prefill, decode, make_engines):
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = free.getsockname()[:2]
    with pytest.raises(ConfigError, match=r"no prefill engine can be reached at 127\.0\.0\.1:.*--kv-role prefill"):
        RemoteLink(decode, identity_of(decode, "shm"), connector_of("shm"), nobody)
    with serving(prefill, secret="right") as server:
        for changes, secret, words in (
            ({}, "wrong", "--kv-secret"),
            *(({name: "7"}, "right", f"different {re.escape(words)}: '7' here") for name, words in WORDS.items()),
            ({"experts": "True", "weights": "0"}, "right", r"ways to share experts out .*: 'True' here"),
        ):
            with pytest.raises(ConfigError, match=words) as error:
                RemoteLink(
                    decode, identity_of(decode, "shm") | changes, connector_of("shm"), server.address, secret=secret
                )
            assert error.value.param == "kv_peer"
        with linked(decode, server.address, secret="right") as front:
            assert front.links[0].alive
    with pytest.raises(ConfigError, match="must be shm or transfer"):
        connector_of("rdma")
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(ConfigError, match="--kv-listen"):
        PrefillServer(PromptService(prefill), {}, connector_of("shm"), other.getsockname()[:2])


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"deterministic": True}, "settings"),
        ({"logprobs_mode": "processed"}, "settings"),
        ({"backend": "triton"}, "settings"),
        ({"logits_processors": PROCESSORS}, "processors"),
    ],
)
def test_whatever_would_make_other_kv_or_tokens_is_a_difference(decode, changes, name):
    parts = {part: getattr(decode, part) for part in ("spec", "placement", "params", "handovers")}
    other: Any = SimpleNamespace(config=dataclasses.replace(decode.config, **changes), **parts)
    reason = difference(identity_of(decode, "shm"), identity_of(other, "shm"))
    assert reason is not None and f"different {WORDS[name]}" in reason


def test_a_stranger_on_the_line_does_no_harm(prefill, decode, plain):
    with serving(prefill) as server:
        for noise in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4, b"JXKV" + b"\xff" * 40, b""):
            with socket.create_connection(server.address) as stranger:
                stranger.sendall(noise)
        with linked(decode, server.address) as front:
            assert tokens_of(answers(front, LONG[:1], [GREEDY])) == tokens_of(answers(plain, LONG[:1], [GREEDY]))


def test_no_shared_memory_stays_behind(prefill, decode):
    with serving(prefill) as server, linked(decode, server.address):
        wait_for(lambda: not list(Path("/dev/shm").glob("jaxcb-kv-*")))  # the server unlinks it when it hears "joined"


def test_weights_are_not_changed_on_one_side_alone(prefill, decode, params):
    with (
        serving(prefill) as server,
        linked(decode, server.address) as front,
    ):
        for engine in (front, decode, prefill):
            with pytest.raises(ConfigError, match="another process") as error:
                engine.update_params(params)
            assert error.value.param == "params"
    for engine in (decode, prefill):
        engine.update_params(params)
