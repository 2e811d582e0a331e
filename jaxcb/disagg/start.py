"""From a config to a decode engine that others compute prompts for, in this process or elsewhere."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxcb import validation
from jaxcb.config import EngineConfig
from jaxcb.devices import placement_of
from jaxcb.disagg.connector import connector_of
from jaxcb.disagg.front import Disaggregated
from jaxcb.disagg.identity import identity_of
from jaxcb.disagg.local import LocalLink
from jaxcb.disagg.prompts import PromptService
from jaxcb.disagg.remote import RemoteLink
from jaxcb.disagg.server import PrefillServer, check_secret
from jaxcb.disagg.wire import address_of
from jaxcb.engine import Engine, ServingEngine, gpu_memory
from jaxcb.errors import ConfigError
from jaxcb.held_model import HeldModel
from jaxcb.weights import load

_FILES = ("event_log", "step_log", "trace")


def start_pairs(
    config: EngineConfig, *, num_prefill: int, num_decode: int, progress: bool = True
) -> list[Disaggregated]:
    """Engines of this process, each on ``tensor_parallel_size`` devices of its own, over weights that are read once.
    All decode engines share the prefill engines; the first of them shuts those down.

    Raises:
        ModelError: the model can't be found or read.
        ConfigError: the configuration can't work for it, or asks for more devices than there are.
    """
    for name, count in (("num_prefill", num_prefill), ("num_decode", num_decode)):
        validation.integer(name, count, low=1, error=ConfigError)
    if not isinstance(config.model, HeldModel):  # whose arrays jax holds already
        host_gib = config.host_kv_gib * (num_prefill + num_decode)
        gpu_memory.start_jax(config.gpu_memory_utilization, host_gib)
    groups = _groups(num_prefill, num_decode, config.tensor_parallel_size)
    placement = placement_of(groups[0], config.tensor_parallel_size, expert_parallel=config.enable_expert_parallel)
    model = load(config, progress=progress, placement=placement)
    names = [*(f"prefill-{i}" for i in range(num_prefill)), *(f"decode-{i}" for i in range(num_decode))]
    engines: list[Engine] = []
    try:
        for name, devices in zip(names, groups, strict=True):
            files: dict[str, Any] = {field: _named(getattr(config, field), name) for field in _FILES}
            own = dataclasses.replace(config, kv_transfer=True, **files)
            defaults = model.sampling_defaults
            engine = Engine(model.name, model.spec, model.params, model.tokenizer, own, defaults, devices=devices)
            engines.append(engine)
            engine.compile(progress=progress)
            engine.run()
        prefill, decode = engines[:num_prefill], engines[num_prefill:]
        services = [PromptService(engine) for engine in prefill]
        return [
            Disaggregated(
                engine, [LocalLink(service, engine) for service in services], prefill if engine is decode[0] else ()
            )
            for engine in decode
        ]
    except BaseException:
        for engine in engines:
            engine.shutdown()
        raise


def start_role(
    config: EngineConfig,
    *,
    role: str,
    connector: str,
    listen: str,
    peers: Sequence[str],
    secret: str = "",
    progress: bool = True,
) -> tuple[ServingEngine, PrefillServer | None]:
    """One engine that works with others in other processes. None does both: two that had reserved their pages for what
    the other is to compute would wait for each other.

    Arguments:
        role: "prefill": it listens for decode engines; "decode": it gives its prompts to ``peers``.
        connector: as for :func:`jaxcb.disagg.connector.connector_of`.
        listen: HOST:PORT; of "decode" the host alone matters, where "transfer" is used.
        peers: HOST:PORT of each, for "decode".
        secret: that both sides must know; empty: none, where only this machine reaches what listens.

    Raises:
        ModelError: the model can't be found or read.
        ConfigError: the configuration can't work for it, or a peer can't be reached or doesn't fit.
    """
    if role not in ("prefill", "decode"):
        raise ConfigError(f"role must be prefill or decode, got {role!r}", param="kv_role")
    if bool(peers) != (role == "decode"):
        raise ConfigError(f"role {role!r} {'takes no peers' if peers else 'needs a peer'}", param="kv_peer")
    here = address_of(listen, "kv_listen")
    if role == "prefill":
        check_secret(here[0], secret)
    addresses = [address_of(peer, "kv_peer") for peer in peers]
    engine = Engine.start(dataclasses.replace(config, kv_transfer=True), progress=progress)
    front: ServingEngine = engine
    server, links = None, []
    try:
        identity, way = identity_of(engine, connector), connector_of(connector, here[0])
        if role == "prefill":
            server = PrefillServer(PromptService(engine), identity, way, here, secret=secret)
        else:
            for address in addresses:
                links.append(RemoteLink(engine, identity, way, address, secret=secret))
            front = Disaggregated(engine, links)
    except BaseException:
        for link in links:
            link.close()
        engine.shutdown()
        raise
    return front, server


def _groups(num_prefill: int, num_decode: int, size: int) -> list[tuple[jax.Device, ...]]:
    """Devices of each engine, the prefill engines' first."""
    there, count = jax.local_devices(), (num_prefill + num_decode) * size
    if len(there) < count:
        hint = ""
        if there[0].platform == "cpu":
            hint = f". A CPU counts as one; with JAX_NUM_CPU_DEVICES={count} in the environment as {count}"
        each = f" with tensor_parallel_size {size}" if size > 1 else ""
        raise ConfigError(
            f"disaggregate prefill={num_prefill},decode={num_decode}{each} needs {count} devices, jax has {len(there)} "
            f"({there[0].device_kind}){hint}",
            param="disaggregate",
        )
    return [tuple(there[start : start + size]) for start in range(0, count, size)]


def _named(file: Any, name: str) -> str | None:
    """``trace.json`` of an engine is ``trace-decode-0.json``."""
    if file is None:
        return None
    path = Path(os.fspath(file))
    return str(path.with_name(f"{path.stem}-{name}{path.suffix}"))
