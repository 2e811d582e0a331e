"""How long a step takes, from what it computes: the roofline model, and a line through two constants."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol

from jaxcb.scheduler import StepPlan
from jaxcb.sim.gpus import Gpu
from jaxcb.sim.models import Model

BFLOAT16_BYTES = 2


class StepLoad(NamedTuple):
    """What a step has to compute.

    A worked example: sequence a decodes at position 7, b is given positions 4, 5 and 6 of its prompt.

        row  tokens  context  attended positions
        a    1       8        8
        b    3       7        5 + 6 + 7 = 18         StepLoad(num_tokens=4, kv_tokens=15, num_pairs=26)
    """

    num_tokens: int
    kv_tokens: int
    """Positions whose KV is read, each once a sequence."""
    num_pairs: int
    """Pairs of a query and a position that it attends to."""


class StepTime(Protocol):
    """Anything that knows how long a step takes."""

    def step_s(self, load: StepLoad) -> float:
        """Seconds of one step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimeModel:
    """t = max(weight_bytes / bandwidth, flops_per_token * tokens / flops)
         + kv_bytes_per_token * kv_tokens / bandwidth + attention_flops_per_pair * pairs / flops + overhead_s

    The matrix products read every weight once, whatever the number of tokens, so they take the longer of reading and
    computing. Attention reads the KV of each sequence on its own; sliding windows are not modelled.
    """

    weight_bytes: float
    """Bytes of weights that a step reads."""
    flops_per_token: float
    """FLOP of all matrix products for one token: 2 N for N weights."""
    kv_bytes_per_token: float
    """Bytes of KV that one position holds in all layers."""
    attention_flops_per_pair: float
    """FLOP for one query to attend to one position in all layers: 4 L H D (2 for the score, 2 for the value)."""
    bandwidth: float
    """Achieved bytes/s of the device memory."""
    flops: float
    """Achieved FLOP/s."""
    overhead_s: float
    """Seconds that every step takes besides: launches, norms, sampling, what of the host is not hidden."""

    @classmethod
    def of(cls, model: Model, gpu: Gpu, *, overhead_s: float = 500e-6) -> StepTimeModel:
        """``model`` in bfloat16 on one ``gpu``. The default overhead is an assumption, not a measurement."""
        return cls(
            weight_bytes=model.num_params * BFLOAT16_BYTES,
            flops_per_token=2 * model.num_params,
            kv_bytes_per_token=model.kv_bytes_per_token(BFLOAT16_BYTES),
            attention_flops_per_pair=4 * model.num_layers * model.q_size,
            bandwidth=gpu.bandwidth,
            flops=gpu.flops,
            overhead_s=overhead_s,
        )

    def step_s(self, load: StepLoad) -> float:
        """Seconds of one step."""
        products_s = max(self.weight_bytes / self.bandwidth, self.flops_per_token * load.num_tokens / self.flops)
        kv_s = self.kv_bytes_per_token * load.kv_tokens / self.bandwidth
        attention_s = self.attention_flops_per_pair * load.num_pairs / self.flops
        return products_s + kv_s + attention_s + self.overhead_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearStepTime:
    """A constant and a slope. The defaults are a 7B model in 16 bits on an H100 with its KV reads left out: 14 GB at
    3.35 TB/s, then 14 GFLOP a token at 600 TFLOP/s."""

    fixed_ms: float = 4.2
    per_token_ms: float = 0.023

    def step_s(self, load: StepLoad) -> float:
        """Seconds of one step."""
        return (self.fixed_ms + self.per_token_ms * load.num_tokens) / 1e3


def load_of(plan: StepPlan) -> StepLoad:
    """What a planned step has to compute."""
    decodes = plan.rows[: plan.num_decodes]
    kv_tokens = num_pairs = len(decodes) + sum([row.start for row in decodes])
    for row in plan.rows[plan.num_decodes :]:
        kv_tokens += row.context_len
        num_pairs += row.num_tokens * (2 * row.start + row.num_tokens + 1) // 2
    return StepLoad(plan.num_tokens, kv_tokens, num_pairs)
