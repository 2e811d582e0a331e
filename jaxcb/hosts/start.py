"""start: an engine over several hosts, on the first of them."""

from __future__ import annotations

import contextlib
import dataclasses

from jaxcb.config import EngineConfig
from jaxcb.engine import Engine
from jaxcb.errors import ConfigError
from jaxcb.hosts.leader import Leader
from jaxcb.hosts.prepared import prepare, sizes_of


def start(config: EngineConfig, *, progress: bool = True) -> Engine:
    """Wait for the other hosts, where :func:`jaxcb.hosts.follow` runs; then load the model, compile, and run.

    Raises:
        ModelError: the model can't be found or read.
        ConfigError: the configuration can't work for it; a host is not there in time, or doesn't fit this one.
    """
    if config.node_rank:
        raise ConfigError(
            f"node_rank {config.node_rank} of {config.nnodes} hosts follows the first, and answers nothing itself: "
            "call jaxcb.hosts.follow there, or python -m jaxcb.serve",
            param="node_rank",
        )
    leader = Leader(config)
    with contextlib.ExitStack() as undo, leader.saying_why():
        leader.start_jax()
        prepared = leader.unless_lost(lambda: prepare(config, progress=progress))
        num_pages = leader.agree(prepared.identity, prepared.num_kv_pages)
        model = prepared.model
        engine = Engine(
            model.name,
            model.spec,
            model.params,
            model.tokenizer,
            dataclasses.replace(config, num_kv_pages=num_pages),
            model.sampling_defaults,
            devices=prepared.placement.devices,
            followers=leader,
        )
        undo.callback(engine.shutdown)
        leader.set_sizes(num_pages, sizes_of(engine.config))
        engine.compile(progress=progress)
        leader.wait_ready()
        leader.watch(engine.fail)
        engine.run()
        undo.pop_all()
    return engine
