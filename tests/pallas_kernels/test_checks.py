"""Bad arguments raise ValueError when traced; the message names the argument, what was expected and what was given."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionMetadata, attention_metadata, ragged_paged_attention


def metadata(**changes: Any) -> AttentionMetadata:
    arguments: dict[str, Any] = {
        "query_starts": np.array([0, 1, 3], np.int32),
        "context_lens": np.array([9, 3], np.int32),
        "block_tables": np.zeros((2, 4), np.int32),
        "num_tokens": 4,
        "page_size": 8,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "backend": "xla",
    }
    return attention_metadata(**arguments | changes)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"query_starts": np.zeros(2, np.int32)}, r"query_starts must be of shape \[3\], got shape \[2\]"),
        ({"query_starts": np.zeros(3, np.int64)}, "query_starts must be of dtype int32, got int64"),
        ({"context_lens": np.zeros((2, 1), np.int32)}, r"context_lens must be of shape \[2\], got shape \[2, 1\]"),
        ({"block_tables": np.zeros(4, np.int32)}, r"block_tables must be of shape \[any, any\], got shape \[4\]"),
        ({"page_size": 24}, "page_size must be 8, 16, 32, 64 or 128, got 24"),
        ({"num_heads": 7}, "num_heads must be a multiple of num_kv_heads = 2, got 7"),
        ({"window": 0}, "window must be None or at least 1, got 0"),
        ({"decode_only": True}, r"num_tokens must be the number of sequences \(2\) of decodes, got 4"),
        ({"backend": "cuda"}, "backend must be None or one of xla, triton, native, got 'cuda'"),
    ],
)
def test_metadata(changes, message):
    with pytest.raises(ValueError, match=message):
        metadata(**changes)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"q": np.zeros((4, 96), np.float32)}, r"q must be of shape \[4, any, 16\], got shape \[4, 96\]"),
        ({"q": np.zeros((5, 6, 16), np.float32)}, r"q must be of shape \[4, any, 16\], got shape \[5, 6, 16\]"),
        ({"q": np.zeros((4, 6, 16), np.int32)}, "q must be of dtype float32 or bfloat16 or float16, got int32"),
        ({"q": np.zeros((4, 5, 16), np.float32)}, "q must be of a multiple of 2 heads, got 5 heads"),
        ({"kv_pages": np.zeros((12, 8, 2, 16), np.int8)}, "kv_pages must be of dtype .* got int8"),
        ({"kv_pages": np.zeros((12, 8, 32), np.float32)}, r"kv_pages must be of shape .* got shape \[12, 8, 32\]"),
        (
            {"kv_pages": np.zeros((10, 8, 2, 16), np.float32)},
            r"kv_pages must be of a multiple .* = 4 flat pages, got 10",
        ),
        ({"kv_pages": np.zeros((12, 16, 2, 16), np.float32)}, "metadata must be built for pages of 16, got 8"),
        ({"layer": 2}, r"layer must be in \[0, 2\), got 2"),
        ({"window": 5}, "metadata must be built for window 5, got one for None"),
        ({"backend": "triton"}, "metadata must be built for backend triton, got one for xla"),
    ],
)
def test_attention(changes, message):
    arguments: dict[str, Any] = {
        "q": np.zeros((4, 6, 16), np.float32),
        "kv_pages": np.zeros((12, 8, 2, 16), np.float32),
        "layer": 1,
        "num_layers": 2,
        "backend": "xla",
    }
    with pytest.raises(ValueError, match=message):
        ragged_paged_attention(metadata=metadata(), **arguments | changes)


def test_checks_work_on_shapes_alone():
    """Inside jit the arguments are tracers."""
    with pytest.raises(ValueError, match="page_size must be"):
        jax.eval_shape(lambda table: metadata(block_tables=table, page_size=12), jnp.zeros((2, 4), jnp.int32))
