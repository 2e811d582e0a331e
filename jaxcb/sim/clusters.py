"""From a preset and a number of cards to replicas and their placement."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxcb.config import EngineConfig
from jaxcb.errors import ConfigError
from jaxcb.presets import Pools, find_preset
from jaxcb.scheduler import StepPlan
from jaxcb.sim.disaggregated import STORE_BLOCK_TOKENS, Disaggregated, Network, Store
from jaxcb.sim.gpus import GPUS, Gpu
from jaxcb.sim.models import Model, ModelShape
from jaxcb.sim.replica import ReplicaSpec
from jaxcb.sim.simulator import Placement, Simulation
from jaxcb.sim.sizing import bucket_padding, limits_on
from jaxcb.sim.step_time import BFLOAT16_BYTES, StepTimeModel
from jaxcb.sim.trace import TraceRequest
from jaxcb.sizing import fills_exactly


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What every system of a comparison gets."""

    model: ModelShape
    gpu: Gpu
    num_gpus: int = 1
    """Each holds the whole model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """The cards of a system, and who does what on them."""

    gpus: tuple[Gpu, ...]
    specs: tuple[ReplicaSpec, ...]
    placement: Placement | None

    def simulation(self, trace: Sequence[TraceRequest]) -> Simulation:
        """A run of it. A cluster is run once: its placement remembers."""
        return Simulation(self.specs, trace, self.placement)

    @property
    def usd_per_hour(self) -> float | None:
        """Rent of all cards; None if a price is missing."""
        prices = [gpu.usd_per_hour for gpu in self.gpus]
        return None if None in prices else sum(price for price in prices if price is not None)

    @property
    def watts(self) -> float:
        return sum(gpu.watts for gpu in self.gpus)


def cluster_of(
    name: str,
    machine: Machine,
    *,
    given: Mapping[str, Any] | None = None,
    ttft_limit_s: float | None = None,
) -> Cluster:
    """A preset on a machine.

    Arguments:
        given: fields of EngineConfig that stand over the preset's.
        ttft_limit_s: what early rejection predicts against, in systems that have it.

    Raises:
        ConfigError: there is no such preset, the model doesn't fit a card, or there are too few cards.
    """
    preset = find_preset(name)
    config = EngineConfig(**{**preset.settings, **(given or {})})
    if preset.pools is not None:
        return _disaggregated(preset.pools, config, machine, ttft_limit_s)
    spec = _spec(machine.model, machine.gpu, config)
    specs = [
        dataclasses.replace(spec, padding=StaticPadding()) if preset.padded else spec for _ in range(machine.num_gpus)
    ]
    return Cluster(gpus=(machine.gpu,) * machine.num_gpus, specs=tuple(specs), placement=None)


def own_cluster(machine: Machine, config: EngineConfig) -> Cluster:
    """This engine on each card, with its compiled sizes: a step computes the padding of the one that it runs in."""
    config = dataclasses.replace(config, exact_fill=fills_exactly(config, padding_costs=True))
    spec = _spec(machine.model, machine.gpu, config)
    spec = dataclasses.replace(spec, padding=bucket_padding(config, spec.limits))
    return Cluster(gpus=(machine.gpu,) * machine.num_gpus, specs=(spec,) * machine.num_gpus, placement=None)


def _disaggregated(pools: Pools, config: EngineConfig, machine: Machine, ttft_limit_s: float | None) -> Cluster:
    if machine.num_gpus < 2:
        raise ConfigError("separate prefill and decode pools need at least 2 GPUs", param="num_gpus")
    num_prefill = min(max(round(machine.num_gpus * pools.prefill_part), 1), machine.num_gpus - 1)
    decode_gpu = machine.gpu if pools.decode_gpu is None else GPUS[pools.decode_gpu]
    gpus = (machine.gpu,) * num_prefill + (decode_gpu,) * (machine.num_gpus - num_prefill)
    # What arrives over the network is found through the prefix cache.
    decode_config = dataclasses.replace(config, enable_prefix_caching=True)
    specs = [
        _spec(machine.model, gpu, config)
        if index < num_prefill
        else dataclasses.replace(_spec(machine.model, gpu, decode_config), continues=True)
        for index, gpu in enumerate(gpus)
    ]
    bytes_per_token = machine.model.kv_bytes_per_token(BFLOAT16_BYTES)
    bandwidth = min(machine.gpu.network_bandwidth, decode_gpu.network_bandwidth)
    store = None
    if pools.store_gib:
        num_bytes = pools.store_gib * 2**30 * machine.num_gpus
        store = Store(int(num_bytes // (bytes_per_token * STORE_BLOCK_TOKENS)))
    placement = Disaggregated(
        num_prefill,
        Network(bytes_per_token=bytes_per_token, bandwidth=bandwidth),
        store=store,
        ttft_limit_s=ttft_limit_s if pools.early_rejection else None,
    )
    return Cluster(gpus=gpus, specs=tuple(specs), placement=placement)


def _spec(model: Model, gpu: Gpu, config: EngineConfig) -> ReplicaSpec:
    return ReplicaSpec(
        limits=limits_on(gpu, model, config), step_time=StepTimeModel.of(model, gpu), run_ahead=config.run_ahead
    )


class StaticPadding:
    """Tokens of a step of padded static batching: prompts are as long as the longest of the step, and rows whose
    sequences have ended decode on until the whole batch is done (FasterTransformer)."""

    def __init__(self) -> None:
        self._batch: set[int] = set()

    def __call__(self, plan: StepPlan) -> int:
        rows = {id(row.sequence) for row in plan.rows}
        if not rows & self._batch:
            self._batch.clear()
        self._batch |= rows
        return max(row.num_tokens for row in plan.rows) * (len(self._batch) if plan.decode_only else len(plan.rows))


def longest(trace: Sequence[TraceRequest]) -> int:
    """Tokens of the longest sequence of a trace: what ``max_model_len`` has to be for all of it."""
    return max(request.num_prompt_tokens + request.num_output_tokens for request in trace)
