"""The ways to put a model on several cards, side by side: one copy cut over them, a copy on each, prompts apart from
answers. As of :mod:`jaxcb.plan.capacity`, requests are of average length and evenly spread."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Protocol

from jaxcb.config import EngineConfig
from jaxcb.errors import ConfigError
from jaxcb.plan.capacity import Capacity, Workload
from jaxcb.sim.gpus import Gpu
from jaxcb.sim.models import ModelShape


@dataclasses.dataclass(frozen=True)
class Times:
    """Of a shape at a rate of arrivals."""

    itl_s: float
    longest_gap_s: float
    """Between two tokens: a step with as much of a prompt as the token budget lets in."""
    ttft_s: float


class Shape(Protocol):
    """So many cards, and who does what on them."""

    @property
    def engine(self) -> Capacity:
        """One of its engines, which are alike."""

    @property
    def num_kv_tokens(self) -> int:
        """That running answers may hold, on all cards together."""

    def most_requests_per_s(self, workload: Workload) -> float: ...

    def at_rate(self, rate: float, workload: Workload) -> Times: ...


@dataclasses.dataclass(frozen=True)
class Replicated:
    """``count`` engines behind one queue, each on one card, or cut over ``tensor_parallel_size`` of them."""

    engine: Capacity
    count: int = 1

    @property
    def num_kv_tokens(self) -> int:
        return self.count * self.engine.num_kv_tokens

    def most_requests_per_s(self, workload: Workload) -> float:
        return self.count * self.engine.most_requests_per_s(workload)

    def at_rate(self, rate: float, workload: Workload) -> Times:
        point = self.engine.at_rate(rate / self.count, workload)
        return Times(point.itl_s, self.engine.longest_step_s(point.batch, workload), point.ttft_s)


@dataclasses.dataclass(frozen=True)
class Apart:
    """Engines that compute prompts, and engines that generate. KV goes from card to card while the next chunk is
    computed, and the first token doesn't wait for it."""

    engine: Capacity
    num_prefill: int
    num_decode: int

    @property
    def num_kv_tokens(self) -> int:
        return self.num_decode * self.engine.num_kv_tokens

    def most_requests_per_s(self, workload: Workload) -> float:
        """Of the pool that is full first."""
        batch = self.engine.most_at_once(workload)
        decoded = batch / self.engine.decode_s(batch, workload.mean_context) / workload.output
        return min(self.num_prefill / self._prompt_s(workload), self.num_decode * decoded)

    def at_rate(self, rate: float, workload: Workload) -> Times:
        itl_s = self.engine.decode_s(1, workload.mean_context)
        for _ in range(300):
            batch = min(rate / self.num_decode * workload.output * itl_s, self.engine.limits.max_num_seqs)
            itl_s = self.engine.decode_s(max(batch, 1.0), workload.mean_context)
        num_chunks = math.ceil(workload.prompt / self.engine.limits.max_num_batched_tokens)
        prompt_s = num_chunks * self.engine.chunk_s(0, 1 / num_chunks, workload)
        busy = min(rate / self.num_prefill * self._prompt_s(workload), 0.999)
        return Times(itl_s, itl_s, prompt_s + busy / (2 * (1 - busy)) * prompt_s)

    def _prompt_s(self, workload: Workload) -> float:
        """What a prompt adds to the work of a prefill engine whose steps are full."""
        prompts = self.engine.limits.max_num_batched_tokens / workload.prompt
        return self.engine.chunk_s(0, prompts, workload) / prompts


def shapes_of(
    model: ModelShape, gpu: Gpu, num_gpus: int, workload: Workload, config: EngineConfig
) -> Mapping[str, Shape | ConfigError]:
    """One card, and the ways to use ``num_gpus``, by name; why, in the place of one that doesn't work. Of the ways to
    divide engines into those for prompts and those for answers, it is the one that serves most."""
    shapes: dict[str, Shape | ConfigError] = {}
    sizes = [size for size in range(1, num_gpus + 1) if num_gpus % size == 0]
    engines = {
        size: _engine(model, gpu, workload, dataclasses.replace(config, tensor_parallel_size=size)) for size in sizes
    }
    for count, size in sorted({(1, 1), *((num_gpus // size, size) for size in sizes)}):
        engine = engines[size]
        shapes[_named(count, size)] = engine if isinstance(engine, ConfigError) else Replicated(engine, count)
    for size in sizes:
        engine, count = engines[size], num_gpus // size
        if count > 1 and not isinstance(engine, ConfigError):
            ways = [Apart(engine, num_prefill, count - num_prefill) for num_prefill in range(1, count)]
            best = max(ways, key=lambda way: way.most_requests_per_s(workload))
            each = f", each tp {size}" if size > 1 else ""
            shapes[f"prefill {best.num_prefill}, decode {best.num_decode}{each}"] = best
    return shapes


def _engine(model: ModelShape, gpu: Gpu, workload: Workload, config: EngineConfig) -> Capacity | ConfigError:
    try:
        engine = Capacity(model, gpu, config)
        engine.most_at_once(workload)
        return engine
    except ConfigError as error:
        return error


def _named(count: int, size: int) -> str:
    parts = [f"dp {count}" if count > 1 else "", f"tp {size}" if size > 1 else ""]
    return " x ".join(part for part in parts if part) or "one card"
