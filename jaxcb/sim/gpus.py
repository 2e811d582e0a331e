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
    host_bandwidth: float
    """Of the link to the host's memory, bytes/s one way: what swapping pays."""
    peer_bandwidth: float
    """Of the links to the other cards of its machine, bytes/s one way: what all-reduces and hand-overs pay."""
    network_bandwidth: float
    """Of the card's share of the network between machines, bytes/s: what sending KV to another machine pays."""
    watts: float
    """Most power that the card draws, as its data sheet says. That it draws it all the time is an assumption."""
    usd_per_hour: float | None = None
    """What renting it costs: an eighth of the price of a machine of eight in Splitwise (ISCA 2024), table I, of 2023;
    None where that names none. Prices change, so pass your own."""
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
# Links between cards: NVLink 3 (600 GB/s both ways together) and 4 (900 GB/s); an L4 has its PCIe.
# Host links: PCIe Gen4 x16 (32 GB/s), Gen5 x16 (64 GB/s). Networks: 200 and 400 Gbit/s a card in a DGX A100 and H100,
# 100 Gbit/s for a machine of L4s, an assumption.
GPUS = {
    "a100": Gpu(
        name="A100 80GB",
        peak_flops=312e12,
        peak_bandwidth=2.039e12,
        memory_bytes=80e9,
        host_bandwidth=32e9,
        peer_bandwidth=300e9,
        network_bandwidth=25e9,
        watts=400.0,
        usd_per_hour=17.6 / 8,
    ),
    "h100": Gpu(
        name="H100",
        peak_flops=989e12,
        peak_bandwidth=3.35e12,
        memory_bytes=80e9,
        host_bandwidth=64e9,
        peer_bandwidth=450e9,
        network_bandwidth=50e9,
        watts=700.0,
        usd_per_hour=38.0 / 8,
    ),
    "h200": Gpu(
        name="H200",
        peak_flops=989e12,
        peak_bandwidth=4.8e12,
        memory_bytes=141e9,
        host_bandwidth=64e9,
        peer_bandwidth=450e9,
        network_bandwidth=50e9,
        watts=700.0,
    ),
    "l4": Gpu(
        name="L4",
        peak_flops=121e12,
        peak_bandwidth=0.3e12,
        memory_bytes=24e9,
        host_bandwidth=32e9,
        peer_bandwidth=32e9,
        network_bandwidth=12.5e9,
        watts=72.0,
        flops_fraction=0.5,
    ),
}
