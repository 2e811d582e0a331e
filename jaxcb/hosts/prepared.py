"""What every host does before the first order: load its parts of the model, and work out the engine's sizes."""

from __future__ import annotations

import dataclasses

from jaxcb.config import EngineConfig
from jaxcb.devices import Placement
from jaxcb.engine import gpu_memory
from jaxcb.engine.sizing import buckets_of, resolve_config, shape_of
from jaxcb.hosts.group import devices_of
from jaxcb.hosts.identity import Weights, model_of
from jaxcb.weights import LoadedModel, load


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A model's parts on this host's devices, and what their memory has room for."""

    config: EngineConfig
    """As asked for."""
    model: LoadedModel
    placement: Placement
    identity: dict[str, str]
    num_kv_pages: int
    """What this host would take."""

    def resolved(self, num_kv_pages: int) -> EngineConfig:
        """With the number of pages that every host has room for."""
        dtype = self.model.params["embed"]["embedding"].dtype
        config = dataclasses.replace(self.config, num_kv_pages=num_kv_pages)
        return resolve_config(config, self.model.spec, dtype, self.placement)


def prepare(config: EngineConfig, *, progress: bool) -> Prepared:
    """jax runs over all hosts.

    Raises:
        ModelError: the model can't be found or read.
        ConfigError: the configuration can't work for it, or for the devices that there are.
    """
    gpu_memory.start_jax(config.gpu_memory_utilization, config.host_kv_gib)
    weights = Weights()
    placement = Placement(devices_of(config), weights, expert_parallel=config.enable_expert_parallel)
    model = load(config, progress=progress, placement=placement)
    resolved = resolve_config(config, model.spec, model.params["embed"]["embedding"].dtype, placement)
    assert resolved.num_kv_pages is not None
    return Prepared(config, model, placement, model_of(model.spec, weights, resolved, placement), resolved.num_kv_pages)


def sizes_of(resolved: EngineConfig) -> dict[str, str]:
    """In words, of a resolved config."""
    buckets = ", ".join(map(str, buckets_of(resolved)))
    return {"sizes": f"{shape_of(resolved)}, at most {resolved.max_num_seqs} sequences, steps: {buckets}"}
