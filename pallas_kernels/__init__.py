"""Attention over ragged pages of KV cache, and the KV write: pure functions of arrays, a reference for each.

Backends live behind each function (xla, triton). Nothing of the engine may come in: this package imports only jax.
"""

from pallas_kernels.attention import ragged_paged_attention
from pallas_kernels.kv_write import write_kv
from pallas_kernels.metadata import AttentionMetadata, attention_metadata

__all__ = ["AttentionMetadata", "attention_metadata", "ragged_paged_attention", "write_kv"]
