"""start: from a config to what answers, one engine or several."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from jaxcb import hosts
from jaxcb.cluster.replicas import Replicas
from jaxcb.config import EngineConfig
from jaxcb.devices import groups_of, placement_of
from jaxcb.engine import Engine, ServingEngine, gpu_memory
from jaxcb.held_model import HeldModel
from jaxcb.weights import load


def start(config: EngineConfig | None = None, *, progress: bool = True) -> ServingEngine:
    """Load the model, compile every program, and run: an :class:`Engine`, or with ``data_parallel_size`` above 1
    :class:`Replicas` over so many, on devices of their own. With ``nnodes`` above 1 it is :func:`jaxcb.hosts.start`.

    Raises:
        ModelError: the model can't be found or read.
        ConfigError: the configuration can't work for it, or asks for more devices or hosts than there are.
    """
    config = config or EngineConfig()
    if config.nnodes > 1:
        return hosts.start(config, progress=progress)
    if config.data_parallel_size == 1:
        return Engine.start(config, progress=progress)
    engines = _start_all(config, progress)
    return Replicas(engines, asked_for=config)


def _start_all(config: EngineConfig, progress: bool) -> list[Engine]:
    """The weights are read once, and copied from the first engine's devices to the others'."""
    if not isinstance(config.model, HeldModel):  # whose arrays jax holds already
        host_gib = config.host_kv_gib * config.data_parallel_size
        gpu_memory.start_jax(config.gpu_memory_utilization, host_gib)
    groups = groups_of(config.data_parallel_size, config.tensor_parallel_size)
    configs = [of_engine(config, index) for index in range(len(groups))]
    placement = placement_of(groups[0], config.tensor_parallel_size, expert_parallel=config.enable_expert_parallel)
    model = load(configs[0], progress=progress, placement=placement)

    def make(own: EngineConfig, devices: Sequence[jax.Device]) -> Engine:
        return Engine(
            model.name, model.spec, model.params, model.tokenizer, own, model.sampling_defaults, devices=devices
        )

    engines: list[Engine] = []
    try:
        for own, devices in zip(configs, groups, strict=True):
            engines.append(make(own, devices))
        _at_once([_compiles(engine, progress=progress and engine is engines[0]) for engine in engines])
        for engine in engines:
            engine.run()
    except BaseException:
        for engine in engines:
            engine.shutdown()
        raise
    return engines


def of_engine(config: EngineConfig, index: int) -> EngineConfig:
    """The config of one of several engines: it writes files of its own, and the limit of the queue is not its own."""
    files: dict[str, Any] = {
        name: _numbered(getattr(config, name), index) for name in ("event_log", "step_log", "trace")
    }
    return dataclasses.replace(config, data_parallel_size=1, max_waiting=None, **files)


def _numbered(file: str | os.PathLike[str] | None, index: int) -> str | None:
    """``trace.json`` of the second engine is ``trace-1.json``."""
    if file is None:
        return None
    path = Path(file)
    return str(path.with_name(f"{path.stem}-{index}{path.suffix}"))


def _compiles(engine: Engine, *, progress: bool) -> Callable[[], None]:
    return lambda: engine.compile(progress=progress)


def _at_once(calls: Sequence[Callable[[], None]]) -> None:
    """Each on a thread; the first error is raised when all are done."""
    with ThreadPoolExecutor(len(calls), thread_name_prefix="jaxcb-start") as pool:
        for done in [pool.submit(call) for call in calls]:
            done.result()
