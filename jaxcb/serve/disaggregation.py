"""The flags of prefill apart from decode: what they ask for, and the engines that they start. jax is imported late."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxcb.config import EngineConfig
from jaxcb.errors import ConfigError

if TYPE_CHECKING:
    from jaxcb.engine import ServingEngine

_COUNTS = re.compile(r"prefill=(\d+),decode=(\d+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Disaggregation:
    """Of this process. Neither counts nor a role: one engine does everything.

    Arguments:
        counts: prefill engines and decode engines of this process.
        role: as for :func:`jaxcb.disagg.start.start_role`; so are the others.
    """

    counts: tuple[int, int] | None = None
    role: str | None = None
    connector: str = "shm"
    listen: str = "127.0.0.1:14579"
    peers: tuple[str, ...] = ()
    secret: str = ""


def disaggregation_of(args: argparse.Namespace) -> Disaggregation:
    """Raises ConfigError if the flags make no sense together."""
    counts = None
    if args.disaggregate is not None:
        match = _COUNTS.fullmatch(args.disaggregate.replace(" ", ""))
        if match is None or "0" in match.groups():
            raise ConfigError(
                f"--disaggregate must be prefill=N,decode=M with N and M of 1 or more, got {args.disaggregate!r}",
                param="disaggregate",
            )
        counts = int(match[1]), int(match[2])
    role, peers = args.kv_role, tuple(args.kv_peer)
    if counts is not None and (role or peers):
        raise ConfigError(
            "--disaggregate is for engines of this process, --kv-role and --kv-peer for those of others: take one",
            param="disaggregate",
        )
    if role == "decode" and not peers:
        raise ConfigError("--kv-role decode needs --kv-peer: the --kv-listen of a prefill engine", param="kv_peer")
    if peers and role != "decode":
        raise ConfigError("--kv-peer is for --kv-role decode", param="kv_peer")
    for param in ("kv_listen", "kv_connector") if role is None else ():
        if getattr(args, param) is not None:
            raise ConfigError(f"--{param.replace('_', '-')} is for engines with a --kv-role", param=param)
    if counts is not None or role is not None:
        _check_alone(args, "kv_role" if counts is None else "disaggregate")
    return Disaggregation(
        counts=counts,
        role=role,
        connector=Disaggregation.connector if args.kv_connector is None else args.kv_connector,
        listen=Disaggregation.listen if args.kv_listen is None else args.kv_listen,
        peers=peers,
        secret=args.kv_secret,
    )


def start(config: EngineConfig, options: Disaggregation) -> tuple[ServingEngine, Callable[[], None]]:
    """What answers, and what is to be called before it is shut down.

    Raises:
        ModelError, ConfigError: as for :mod:`jaxcb.disagg.start`.
    """
    if options.counts is not None:
        from jaxcb.cluster import Replicas
        from jaxcb.disagg.start import start_pairs

        fronts = start_pairs(config, num_prefill=options.counts[0], num_decode=options.counts[1])
        if len(fronts) == 1:
            return fronts[0], _nothing
        return Replicas(fronts), _nothing  # type: ignore[arg-type]  # they show all that Replicas looks at of an Engine
    if options.role is not None:
        from jaxcb.disagg.start import start_role

        engine, server = start_role(
            config,
            role=options.role,
            connector=options.connector,
            listen=options.listen,
            peers=options.peers,
            secret=options.secret,
        )
        return engine, (_nothing if server is None else server.close)
    from jaxcb.cluster import start as start_all

    return start_all(config), _nothing


def _check_alone(args: argparse.Namespace, param: str) -> None:
    """On every host, of which those that follow the first have no engine to start."""
    if args.data_parallel_size > 1:
        raise ConfigError(
            f"--{param.replace('_', '-')} is not for --data-parallel-size {args.data_parallel_size}: "
            "--disaggregate prefill=N,decode=M has several decode engines behind one queue",
            param=param,
        )
    if args.nnodes > 1:
        raise ConfigError(
            f"--{param.replace('_', '-')} is for engines of one host each, not for --nnodes {args.nnodes}",
            param=param,
        )


def _nothing() -> None:
    """No door to close first."""
