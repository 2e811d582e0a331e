"""The triton backend: Pallas kernels lowered through Triton, for NVIDIA GPUs from Ampere on."""
