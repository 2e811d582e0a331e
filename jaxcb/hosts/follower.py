"""Every host but the first: it joins, loads its parts, and carries out what the first one's runner orders."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
from typing import NoReturn

import jax

from jaxcb.cache import cache_dir
from jaxcb.config import EngineConfig
from jaxcb.disagg.fields import Fields
from jaxcb.disagg.identity import difference
from jaxcb.disagg.wire import Channel, address_of
from jaxcb.engine.compile_guard import CompileGuard
from jaxcb.engine.sizing import runner_of
from jaxcb.errors import ConfigError, JaxcbError, PeerError
from jaxcb.hosts.group import join
from jaxcb.hosts.identity import WORDS, program_of
from jaxcb.hosts.link import LAST, SILENCE_S, Link
from jaxcb.hosts.messages import unpack
from jaxcb.hosts.prepared import prepare, sizes_of
from jaxcb.step.runner import Runner

logger = logging.getLogger(__name__)

_RETRY_S = 0.5


def follow(config: EngineConfig, *, progress: bool = True) -> None:
    """Be host ``node_rank`` of an engine, until the first host shuts it down.

    Once all hosts have joined, whatever goes wrong here or there ends this process with status 1 and a line on stderr:
    it may be waiting for a sum that never comes, which nothing else can end.

    Raises:
        ConfigError: nobody can be reached, or this host doesn't fit; the message says why.
    """
    if config.node_rank == 0:
        raise ConfigError("node_rank 0 is the host that the others follow: call jaxcb.hosts.start", param="node_rank")
    link = _reached(config)
    try:
        link.send("join", rank=config.node_rank, identity=program_of(config))
        coordinator = Fields(link.receive("welcome")[0]).text("coordinator")
    except BaseException as error:
        link.close()
        if isinstance(error, PeerError):
            raise ConfigError(str(error), param="nnodes") from error
        raise
    link.read_ahead(_end)
    try:
        join(config, coordinator)
        runner = _ready(config, link, progress=progress)
        with CompileGuard().watch():
            while (message := link.receive("order", LAST))[0]["kind"] == "order":
                runner.carry_out(unpack(*message))
        jax.distributed.shutdown()
    except PeerError as error:
        _end(str(error))
    except BaseException as error:
        if not isinstance(error, JaxcbError):
            logger.exception("host %d failed", config.node_rank)
        reason = str(error) or type(error).__name__
        with contextlib.suppress(PeerError):
            link.send("failed", reason=reason)
        _end(reason)
    link.close()


def _reached(config: EngineConfig) -> Link:
    address = address_of(config.dist_init_addr or "", "dist_init_addr")
    deadline_s = time.monotonic() + config.dist_timeout_s
    while True:
        left_s = deadline_s - time.monotonic()
        try:
            sock = socket.create_connection(address, timeout=max(min(left_s, SILENCE_S), _RETRY_S))
            break
        except OSError as error:
            if left_s < _RETRY_S:
                raise ConfigError(
                    f"nobody can be reached at {config.dist_init_addr} within {config.dist_timeout_s:g} s: {error}. "
                    "Start the same command with --node-rank 0 on the host of that address",
                    param="dist_init_addr",
                ) from error
            time.sleep(_RETRY_S)
    return Link(Channel(sock, SILENCE_S), "host 0")


def _ready(config: EngineConfig, link: Link, *, progress: bool) -> Runner:
    """This host's runner, with its programs compiled, once all hosts agree on its sizes."""
    prepared = prepare(config, progress=progress)
    link.send("loaded", identity=prepared.identity, num_kv_pages=prepared.num_kv_pages)
    answer = Fields(link.receive("sizes")[0])
    resolved = prepared.resolved(answer.integer("num_kv_pages", 1, 2**31))
    if (reason := difference(sizes_of(resolved), answer.part("sizes"), WORDS)) is not None:
        raise ConfigError(f"host {config.node_rank} (here) and host 0 (there): {reason}")
    runner = runner_of(resolved, prepared.model.spec, prepared.model.params, prepared.placement)
    runner.compile(cache_dir(), progress=progress)
    link.send("ready")
    return runner


def _end(reason: str) -> NoReturn:
    print(f"error: {reason}", file=sys.stderr, flush=True)
    os._exit(1)
