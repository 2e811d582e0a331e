"""How long a step takes, from what it computes: the roofline model, and a line through two constants."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Protocol

from jaxcb.scheduler import StepLoad
from jaxcb.sim.gpus import Gpu
from jaxcb.sim.models import Model

BFLOAT16_BYTES = 2
SUM_LATENCY_S = 10e-6
"""Of an all-reduce of few bytes between the cards of a machine. An assumption: nothing here ran on several."""


class StepTime(Protocol):
    """Anything that knows how long a step takes."""

    def step_s(self, load: StepLoad) -> float:
        """Seconds of one step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimeModel:
    """t = max(weight_bytes_read(tokens) / bandwidth, flops_per_token * tokens / flops)
         + kv_bytes_per_token * kv_tokens / kv_bandwidth
         + attention_flops_per_pair * pairs / attention_flops + sum_s_per_token * tokens + overhead_s

    The matrix products read every weight once, whatever the number of tokens (of experts those that a token takes), so
    they take the longer of reading and computing. Attention reads the KV of each sequence on its own; sliding windows
    are not modelled. A rate may be infinite: what it stands for then costs nothing.
    """

    weight_bytes: float
    """Bytes of weights: what a step reads if every expert has tokens, or there are no experts."""
    flops_per_token: float
    """FLOP of all matrix products for one token: 2 N for the N weights that it meets."""
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
    kv_bandwidth: float
    """Achieved bytes/s of attention's reads."""
    attention_flops: float
    """Achieved FLOP/s of attention."""
    expert_bytes: float = 0.0
    """Of ``weight_bytes`` those of the experts."""
    expert_share: float = 1.0
    """The part of the experts that a token takes."""
    sum_s_per_token: float = 0.0
    """What a token adds to the all-reduces of a model that is cut over several cards."""

    @classmethod
    def of(cls, model: Model, gpu: Gpu, *, overhead_s: float = 500e-6, num_gpus: int = 1) -> StepTimeModel:
        """``model`` in bfloat16 on one ``gpu``. The default overhead is an assumption, not a measurement.

        Arguments:
            num_gpus: under tensor parallel ``model`` is the part that each of so many has. They add up twice a layer,
                and once for the embedding; in a ring each sends 2 (N - 1) / N of what is added up.
        """
        num_sums = 2 * model.num_layers + 1 if num_gpus > 1 else 0
        sent = 2 * (num_gpus - 1) / num_gpus * model.hidden_size * BFLOAT16_BYTES
        return cls(
            weight_bytes=model.num_params * BFLOAT16_BYTES,
            flops_per_token=2 * model.num_active_params,
            kv_bytes_per_token=model.kv_bytes_per_token(BFLOAT16_BYTES),
            attention_flops_per_pair=4 * model.num_layers * model.q_size,
            bandwidth=gpu.bandwidth,
            flops=gpu.flops,
            overhead_s=overhead_s + num_sums * SUM_LATENCY_S,
            kv_bandwidth=gpu.bandwidth,
            attention_flops=gpu.flops,
            expert_bytes=model.num_expert_params * BFLOAT16_BYTES,
            expert_share=model.expert_share,
            sum_s_per_token=num_sums * sent / (gpu.peer_bandwidth * gpu.bandwidth_fraction),
        )

    @classmethod
    def fit(cls, file: str | Path) -> StepTimeModel:
        """Calibrate on the steps of a real run: a file written by ``python -m jaxcb.serve --step-log FILE``.

        A fit takes it that every step reads the same weights: of a model with experts it holds for batches like the
        log's.

        Raises:
            ConfigError: the file can't be read, a line is malformed, or it holds too few steps.
        """
        from jaxcb.sim.calibrate import fit, read_step_log

        return fit(read_step_log(Path(file)))

    @property
    def knee_tokens(self) -> float:
        """Tokens of a step from which the products are bound by computing, no longer by reading the weights (by then
        those of every expert)."""
        return self.weight_bytes / self.bandwidth * self.flops / self.flops_per_token

    def weight_bytes_read(self, num_tokens: float) -> float:
        """Bytes that a step reads: of the experts those that are taken, if tokens choose evenly and by themselves."""
        return self.weight_bytes - self.expert_bytes * (1 - self.expert_share) ** num_tokens

    def step_s(self, load: StepLoad) -> float:
        """Seconds of one step."""
        read_s = self.weight_bytes_read(load.num_tokens) / self.bandwidth
        products_s = max(read_s, self.flops_per_token * load.num_tokens / self.flops)
        kv_s = self.kv_bytes_per_token * load.kv_tokens / self.kv_bandwidth
        attention_s = self.attention_flops_per_pair * load.num_pairs / self.attention_flops
        sums_s = self.sum_s_per_token * load.num_tokens
        return products_s + kv_s + attention_s + sums_s + self.overhead_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearStepTime:
    """A constant and a slope. The defaults are a 7B model in 16 bits on an H100 with its KV reads left out: 14 GB at
    3.35 TB/s, then 14 GFLOP a token at 600 TFLOP/s."""

    fixed_ms: float = 4.2
    per_token_ms: float = 0.023

    def step_s(self, load: StepLoad) -> float:
        """Seconds of one step."""
        return (self.fixed_ms + self.per_token_ms * load.num_tokens) / 1e3
