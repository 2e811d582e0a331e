"""Attention over ragged pages of KV cache, the KV write, products of experts: pure functions of arrays, each with a
reference.

Backends live behind each function. Nothing of the engine may come in: this package knows jax and no request.
"""

from pallas_kernels.attention import decode_attention, ragged_paged_attention
from pallas_kernels.fused import add_rms_norm, rms_norm, rope_and_write_kv, silu_mul
from pallas_kernels.grouped import Groups, group_rows, grouped_product
from pallas_kernels.kv_write import write_kv
from pallas_kernels.metadata import AttentionMetadata, Backend, attention_metadata, default_backend
from pallas_kernels.norms import HeadNorm, LateNorm, RawQueries
from pallas_kernels.page_copy import copy_pages, gather_pages, scatter_pages
from pallas_kernels.pages import QuantizedPages
from pallas_kernels.selection import least_kept_weight

__all__ = [
    "AttentionMetadata",
    "Backend",
    "Groups",
    "HeadNorm",
    "LateNorm",
    "QuantizedPages",
    "RawQueries",
    "add_rms_norm",
    "attention_metadata",
    "copy_pages",
    "decode_attention",
    "default_backend",
    "gather_pages",
    "group_rows",
    "grouped_product",
    "least_kept_weight",
    "ragged_paged_attention",
    "rms_norm",
    "rope_and_write_kv",
    "scatter_pages",
    "silu_mul",
    "write_kv",
]
