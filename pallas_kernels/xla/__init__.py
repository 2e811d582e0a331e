"""The xla backend: plain jax.numpy with loops of dynamic length, first-class on CPUs, a fallback anywhere.

No kernels here, and no array that is as wide as the longest possible context.
"""
