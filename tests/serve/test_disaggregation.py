"""The flags of prefill apart from decode, read and refused."""

from __future__ import annotations

import pytest

from jaxcb.errors import ConfigError
from jaxcb.serve.cli import parse
from jaxcb.serve.disaggregation import Disaggregation, start


def read(*argv: str) -> Disaggregation:
    return parse(argv, {})[1].disaggregation


def test_without_flags_one_engine_does_everything():
    options = read()
    assert (options.counts, options.role, options.peers) == (None, None, ())


def test_counts_of_one_process_and_roles_of_several_are_read():
    assert read("--disaggregate", "prefill=2,decode=3").counts == (2, 3)
    options = read("--kv-role", "decode", "--kv-peer", "a:1", "[::1]:2", "--kv-connector", "transfer")
    assert (options.role, options.peers, options.connector) == ("decode", ("a:1", "[::1]:2"), "transfer")
    assert parse((), {"JAXCB_KV_SECRET": "x"})[1].disaggregation.secret == "x"


@pytest.mark.parametrize(
    ("argv", "param"),
    [
        (("--disaggregate", "prefill=1"), "disaggregate"),
        (("--disaggregate", "prefill=0,decode=1"), "disaggregate"),
        (("--disaggregate", "prefill=1,decode=1", "--kv-role", "prefill"), "disaggregate"),
        (("--kv-role", "decode"), "kv_peer"),
        (("--kv-peer", "a:1"), "kv_peer"),
        (("--kv-role", "prefill", "--kv-peer", "a:1"), "kv_peer"),
        (("--kv-listen", "127.0.0.1:0"), "kv_listen"),
        (("--disaggregate", "prefill=1,decode=1", "--kv-connector", "shm"), "kv_connector"),
        (("--disaggregate", "prefill=1,decode=1", "--data-parallel-size", "2"), "disaggregate"),
        (("--kv-role=prefill", "-tp=2", "--nnodes=2", "--node-rank=1", "--dist-init-addr=a:1"), "kv_role"),
    ],
)
def test_what_makes_no_sense_together_is_refused_by_name(argv, param):
    with pytest.raises(ConfigError) as error:
        read(*argv)
    assert error.value.param == param


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--disaggregate", "prefill=40,decode=30"), "needs 70 devices"),
        (("--kv-role", "prefill", "--kv-listen", "nowhere"), "--kv-listen must be HOST:PORT"),
        (("--kv-role", "decode", "--kv-peer", "host:port"), "--kv-peer must be HOST:PORT"),
        (("--kv-role", "prefill", "--kv-listen", "0.0.0.0:0"), "without --kv-secret"),
        (("--kv-role", "prefill", "--kv-listen", "[::]:0"), "without --kv-secret"),
    ],
)
def test_what_can_not_be_started_is_refused_before_a_model_is_loaded(argv, words):
    config, options = parse(argv, {})
    with pytest.raises(ConfigError, match=words):
        start(config, options.disaggregation)
