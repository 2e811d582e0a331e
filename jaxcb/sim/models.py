"""Models as a step-time model sees them: how many weights, and what a position costs in the KV cache.

:class:`jaxcb.models.spec.ModelSpec` is such a model too. It isn't imported here: its package imports jax.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from jaxcb.errors import ConfigError


class Model(Protocol):
    """What the simulator needs to know of a decoder."""

    @property
    def num_params(self) -> int: ...

    @property
    def num_active_params(self) -> int:
        """Weights that a token meets: those of the experts that it takes, not of all."""

    @property
    def num_expert_params(self) -> int:
        """Weights of all experts; 0 without."""

    @property
    def expert_share(self) -> float:
        """The part of the experts that a token takes; 1 without."""

    @property
    def num_layers(self) -> int: ...

    @property
    def q_size(self) -> int:
        """Query heads times head size."""

    @property
    def hidden_size(self) -> int:
        """Of the residual stream."""

    @property
    def max_position(self) -> int:
        """Longest context, in tokens."""

    def kv_bytes_per_token(self, itemsize: int) -> int: ...


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """The few numbers of a published model that decide how long its steps take."""

    name: str
    num_params: int
    """Weights of the matrices, biases and norms left out."""
    num_layers: int
    q_size: int
    """Query heads times head size."""
    kv_size: int
    """KV heads times head size."""
    hidden_size: int
    head_dim: int
    max_position: int
    num_expert_params: int = 0
    """Weights of all experts."""
    expert_share: float = 1.0
    """The part of the experts that a token takes."""

    @property
    def num_active_params(self) -> int:
        """Weights that a token meets."""
        return self.num_params - round(self.num_expert_params * (1 - self.expert_share))

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of KV cache that one position takes in all layers, at ``itemsize`` bytes an element."""
        return self.num_layers * 2 * self.kv_size * itemsize

    def part(self, num_gpus: int) -> ModelShape:
        """What each of so many cards has of it under tensor parallel; norms, which each has whole, are not counted.

        Raises:
            ConfigError: its heads don't divide.
        """
        if num_gpus == 1:
            return self
        heads, kv_heads = self.q_size // self.head_dim, self.kv_size // self.head_dim
        if heads % num_gpus or (kv_heads % num_gpus and num_gpus % kv_heads):
            raise ConfigError(
                f"tensor_parallel_size must divide the {heads} heads of {self.name}, and divide its {kv_heads} KV "
                f"heads or be a multiple of them, got {num_gpus}",
                param="tensor_parallel_size",
            )
        replicated = max(num_gpus // kv_heads, 1)
        return dataclasses.replace(
            self,
            num_params=-(-self.num_params // num_gpus),
            q_size=self.q_size // num_gpus,
            kv_size=self.kv_size * replicated // num_gpus,
            num_expert_params=-(-self.num_expert_params // num_gpus),
        )


#        name, weights, layers, H*D, K*D, E, D, positions; of the experts: weights, part that a token takes
MODELS = {
    "135m": ModelShape("SmolLM2-135M", 134_479_872, 30, 576, 192, 576, 64, 8192),
    "0.6b": ModelShape("Qwen3-0.6B", 595_984_384, 28, 2048, 1024, 1024, 128, 40960),
    "1b": ModelShape("Llama-3.2-1B", 1_235_746_816, 16, 2048, 512, 2048, 64, 131072),
    "3b": ModelShape("Llama-3.2-3B", 3_212_574_720, 28, 3072, 1024, 3072, 128, 131072),
    "7b": ModelShape("Mistral-7B-v0.3", 7_247_757_312, 32, 4096, 1024, 4096, 128, 32768),
    "8b": ModelShape("Llama-3.1-8B", 8_029_995_008, 32, 4096, 1024, 4096, 128, 131072),
    "32b": ModelShape("Qwen3-32B", 32_761_446_400, 64, 8192, 1024, 5120, 128, 40960),
    "30b-a3b": ModelShape("Qwen3-30B-A3B", 30_531_911_680, 48, 4096, 512, 2048, 128, 40960, 28_991_029_248, 8 / 128),
    "8x7b": ModelShape("Mixtral-8x7B", 46_702_526_464, 32, 4096, 1024, 4096, 128, 32768, 45_097_156_608, 2 / 8),
    "70b": ModelShape("Llama-3.1-70B", 70_552_387_584, 80, 8192, 1024, 8192, 128, 131072),
}
