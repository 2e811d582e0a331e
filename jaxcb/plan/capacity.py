"""Capacity: what one card serves of a workload, from the step-time model, without a simulation.

It assumes requests of average length that are spread evenly over time: bursts and long tails make the times longer, and
``python -m jaxcb.sim run`` shows how much.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from jaxcb.config import EngineConfig
from jaxcb.errors import ConfigError
from jaxcb.plan.formulas import max_concurrent, swap_s
from jaxcb.scheduler import SchedulerLimits, StepLoad
from jaxcb.sim.gpus import Gpu
from jaxcb.sim.models import ModelShape
from jaxcb.sim.sizing import limits_on
from jaxcb.sim.step_time import BFLOAT16_BYTES, StepTimeModel


@dataclasses.dataclass(frozen=True)
class Workload:
    """Average lengths of a request, in tokens."""

    prompt: float
    output: float

    @property
    def mean_context(self) -> float:
        """Of a sequence while it decodes."""
        return self.prompt + self.output / 2


class BatchPoint(NamedTuple):
    """Steady state at a number of decoding sequences."""

    batch: int
    step_s: float
    """A step of decodes alone."""
    decode_tokens_per_s: float
    tokens_per_s: float
    """Output tokens a second once the prompts of newcomers are computed too."""
    requests_per_s: float
    fits: bool
    """The KV of so many sequences fits the card."""


class RatePoint(NamedTuple):
    """Steady state at a rate of arrivals."""

    utilization: float
    """Rate over the most that can be served; from 1 on the queue grows without end, and the rest is meaningless."""
    batch: float
    itl_s: float
    ttft_s: float


@dataclasses.dataclass(frozen=True)
class Capacity:
    """``model`` in bfloat16 on one ``gpu`` under ``config``, or cut over ``tensor_parallel_size`` of them.

    Raises:
        ConfigError: the model is larger than the cards, doesn't divide among them, or the config doesn't fit it.
    """

    model: ModelShape
    gpu: Gpu
    config: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    overhead_s: float = 500e-6

    def __post_init__(self) -> None:
        self.limits  # noqa: B018  # refuses what can't work

    @property
    def num_gpus(self) -> int:
        return self.config.tensor_parallel_size

    @property
    def part(self) -> ModelShape:
        """What one card has of the model."""
        return self.model.part(self.num_gpus)

    @property
    def limits(self) -> SchedulerLimits:
        """What the engine would choose."""
        return limits_on(self.gpu, self.part, self.config)

    @property
    def step_time(self) -> StepTimeModel:
        return StepTimeModel.of(self.part, self.gpu, overhead_s=self.overhead_s, num_gpus=self.num_gpus)

    @property
    def kv_bytes_per_token(self) -> int:
        """On one card."""
        return self.part.kv_bytes_per_token(BFLOAT16_BYTES)

    @property
    def num_kv_tokens(self) -> int:
        return self.limits.num_kv_pages * self.limits.page_size

    def most_requests(self, context: float) -> int:
        """Sequences of ``context`` tokens that the KV cache holds."""
        return max_concurrent(
            memory_bytes=self.num_kv_tokens * self.kv_bytes_per_token,
            weight_bytes=0.0,
            kv_bytes_per_token=self.kv_bytes_per_token,
            context=context,
        )

    def decode_s(self, batch: float, context: float) -> float:
        """A step of ``batch`` decodes."""
        return self.step_time.step_s(_load(batch, batch * context, batch * context))

    def mixed_s(self, batch: float, prompts: float, workload: Workload) -> float:
        """Mean time of a step where so many prompts (a part of one, say) begin with each step of ``batch`` decodes.

        A prompt isn't spread thinly over all steps: it takes one, or as many as the token budget makes of it, and the
        other steps only decode.
        """
        chunk = min(workload.prompt, max(self.limits.max_num_batched_tokens - batch, 1.0))
        share = min(prompts * workload.prompt / chunk, 1.0)
        return (1 - share) * self.decode_s(batch, workload.mean_context) + share * self.chunk_s(
            batch, prompts / share if share else 0.0, workload
        )

    def chunk_s(self, batch: float, prompts: float, workload: Workload) -> float:
        """A step of ``batch`` decodes and so many whole prompts, or a part of one."""
        tokens = prompts * workload.prompt
        decoded = batch * workload.mean_context
        return self.step_time.step_s(_load(batch + tokens, decoded + tokens, decoded + tokens * workload.prompt / 2))

    def longest_step_s(self, batch: float, workload: Workload) -> float:
        """A step of ``batch`` decodes with as much of a prompt as the token budget lets in."""
        chunk = min(workload.prompt, max(self.limits.max_num_batched_tokens - batch, 1.0))
        return self.chunk_s(batch, chunk / workload.prompt, workload)

    def token_s(self, context: float = 0.0) -> float:
        """Prefill of one token in a step that is bound by computing."""
        model = self.step_time
        attention_s = model.attention_flops_per_pair * context / model.attention_flops
        return model.flops_per_token / model.flops + attention_s + model.sum_s_per_token

    def at_batch(self, batch: int, workload: Workload) -> BatchPoint:
        """``batch`` sequences at a time. Each takes ``output`` steps, so batch / output prompts begin with a step."""
        step_s = self.decode_s(batch, workload.mean_context)
        mixed_s = self.mixed_s(batch, batch / workload.output, workload)
        return BatchPoint(
            batch=batch,
            step_s=step_s,
            decode_tokens_per_s=batch / step_s,
            tokens_per_s=batch / mixed_s,
            requests_per_s=batch / mixed_s / workload.output,
            fits=batch <= self.most_at_once(workload),
        )

    def most_at_once(self, workload: Workload) -> int:
        """Sequences that run together: what the KV cache holds, at most ``max_num_seqs``.

        Raises:
            ConfigError: it holds not even one.
        """
        batch = min(self.most_requests(workload.mean_context), self.limits.max_num_seqs)
        if batch < 1:
            raise ConfigError(
                f"no request of {workload.mean_context:,.0f} tokens fits: the KV cache holds {self.num_kv_tokens:,}",
                param="prompt",
            )
        return batch

    def most_requests_per_s(self, workload: Workload) -> float:
        """At the largest batch that the card holds."""
        return self.at_batch(self.most_at_once(workload), workload).requests_per_s

    def at_rate(self, rate: float, workload: Workload) -> RatePoint:
        """Times at ``rate`` arrivals a second: in a step of s seconds rate * s prompts begin and rate * output * s
        sequences decode, which makes s a fixed point. A prompt waits for half a step and, as in an M/D/1 queue, for
        those before it."""
        itl_s = self.decode_s(1, workload.mean_context)
        for _ in range(300):
            batch = min(rate * workload.output * itl_s, self.limits.max_num_seqs)
            itl_s = self.mixed_s(max(batch, 1.0), min(rate * itl_s, batch / workload.output + 1), workload)
        chunk = min(workload.prompt, max(self.limits.max_num_batched_tokens - batch, 1.0))
        num_chunks = math.ceil(workload.prompt / chunk)
        first_s = num_chunks * self.chunk_s(batch, 1 / num_chunks, workload)
        busy = min(rate * workload.prompt * self.token_s(workload.prompt / 2), 0.999)
        return RatePoint(
            utilization=rate / self.most_requests_per_s(workload),
            batch=batch,
            itl_s=itl_s,
            ttft_s=itl_s / 2 + first_s + busy / (2 * (1 - busy)) * first_s,
        )

    def largest_budget(self, itl_s: float, batch: int, context: float) -> int:
        """Most tokens of a step, ``batch`` decodes among them, whose time stays within ``itl_s``.

        Raises:
            ConfigError: the decodes alone take longer.
        """
        if self.decode_s(batch, context) > itl_s:
            raise ConfigError(
                f"no budget holds {itl_s * 1e3:g} ms between tokens: {batch} decodes at {context:,.0f} tokens take "
                f"{self.decode_s(batch, context) * 1e3:.1f} ms by themselves",
                param="itl",
            )
        low, high = batch, batch + self.limits.max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            chunk = middle - batch
            pairs = batch * context + chunk * (chunk + 1) / 2
            if self.step_time.step_s(_load(middle, batch * context + chunk, pairs)) <= itl_s:
                low = middle
            else:
                high = middle - 1
        return low

    def swap_s(self, num_tokens: int) -> float:
        """Moving a sequence's KV to the host or back."""
        return swap_s(
            num_tokens=num_tokens,
            kv_bytes_per_token=self.kv_bytes_per_token,
            link_bandwidth=self.gpu.host_bandwidth,
        )

    def recompute_s(self, num_tokens: int) -> float:
        """Computing a sequence's KV again, in steps that others fill: what its tokens cost."""
        return num_tokens * self.token_s(num_tokens / 2)


def _load(tokens: float, kv_tokens: float, pairs: float) -> StepLoad:
    return StepLoad(tokens, kv_tokens, pairs)  # type: ignore[arg-type]  # averages need not be whole
