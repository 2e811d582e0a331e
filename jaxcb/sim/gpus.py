"""GPUs as a step-time model sees them: peak numbers of the data sheets and the part of them that programs reach."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """One card.

    The fractions are rules of thumb, not measurements: large matrix products of a served model reach about 60% of
    the dense peak on cards with enough power (less on the 72 W L4), streaming reads about 85% of the memory's.
    """

    name: str
    peak_flops: float
    """Dense bfloat16 tensor-core peak, FLOP/s, without structured sparsity."""
    peak_bandwidth: float
    """Of the device memory, bytes/s."""
    memory_bytes: float
    """As the data sheet names it, in units of 10^9."""
    flops_fraction: float = 0.6
    bandwidth_fraction: float = 0.85

    @property
    def flops(self) -> float:
        """Achieved FLOP/s."""
        return self.peak_flops * self.flops_fraction

    @property
    def bandwidth(self) -> float:
        """Achieved bytes/s."""
        return self.peak_bandwidth * self.bandwidth_fraction


# Data sheets of the A100 80GB SXM, H100 SXM, H200 SXM and L4 (NVIDIA); where they name the sparse peak, half of it.
GPUS = {
    "a100": Gpu(name="A100 80GB", peak_flops=312e12, peak_bandwidth=2.039e12, memory_bytes=80e9),
    "h100": Gpu(name="H100", peak_flops=989e12, peak_bandwidth=3.35e12, memory_bytes=80e9),
    "h200": Gpu(name="H200", peak_flops=989e12, peak_bandwidth=4.8e12, memory_bytes=141e9),
    "l4": Gpu(name="L4", peak_flops=121e12, peak_bandwidth=0.3e12, memory_bytes=24e9, flops_fraction=0.5),
}
