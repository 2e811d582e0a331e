"""Bad arguments raise ValueError when traced; the message names the argument, what was expected and what was given."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    AttentionMetadata,
    HeadNorm,
    LateNorm,
    RawQueries,
    attention_metadata,
    decode_attention,
    ragged_paged_attention,
    rms_norm,
    write_kv,
)
from pallas_kernels.triton.targets import TARGETS, default_target
from tests.pallas_kernels.batches import ragged_batch, relative_error


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
        ({"context_lens": [9, 3]}, "context_lens must be an array, got list"),
        ({"page_size": 24}, "page_size must be 8, 16, 32, 64 or 128, got 24"),
        ({"num_heads": 0}, "num_heads must be an integer of at least 1, got 0"),
        ({"target": "l4"}, "target must be None for backend xla, got 'l4'"),
        ({"target": "b1", "backend": "triton"}, "target must be None or one of h200, h100, a100, l4, got 'b1'"),
        ({"num_heads": 7}, "num_heads must be a multiple of num_kv_heads = 2, got 7"),
        ({"window": 0}, "window must be None or an integer of at least 1, got 0"),
        ({"decode_only": True}, r"num_tokens must be the number of sequences \(2\) of decodes, got 4"),
        ({"backend": "cuda"}, "backend must be None or one of xla, triton, mosaic, native, got 'cuda'"),
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
        ({"kv_pages": np.zeros((12, 16, 2, 16), np.float32)}, "metadata must be built for page_size 16, got one for 8"),
        ({"layer": 2}, r"layer must be in \[0, 2\), got 2"),
        ({"layer": np.int64(-1)}, r"layer must be in \[0, 2\), got -1"),
        ({"layer": jnp.zeros(1, jnp.int32)}, r"layer must be of shape \[\], got shape \[1\]"),
        ({"layer": 0.0}, "layer must be of dtype int32, got float32"),
        ({"q": np.zeros((4, 8, 16), np.float32)}, "metadata must be built for num_heads 8, got one for 6"),
        (
            {"kv_pages": np.zeros((12, 8, 3, 16), np.float32)},
            "metadata must be built for num_kv_heads 3, got one for 2",
        ),
        (
            {"q": np.zeros((4, 6, 32), np.float32), "kv_pages": np.zeros((12, 8, 2, 32), np.float32)},
            "metadata must be built for head_dim 32, got one for 16",
        ),
        ({"soft_cap": 0.0}, r"soft_cap must be a finite number above 0, got 0\.0"),
        ({"soft_cap": -5}, "soft_cap must be a finite number above 0, got -5"),
        ({"soft_cap": float("nan")}, "soft_cap must be a finite number above 0, got nan"),
        ({"soft_cap": float("inf")}, "soft_cap must be a finite number above 0, got inf"),
        ({"scale": float("inf")}, "scale must be a finite number, got inf"),
        ({"scale": "1"}, "scale must be a finite number, got '1'"),
        ({"arrivals": np.zeros((4, 2), np.int32)}, "arrivals must be None where no kernel counts"),
        ({"sinks": np.zeros(5, np.float32)}, r"sinks must be of shape \[6\], got shape \[5\]"),
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


INTEGERS = {"num_tokens": 4, "page_size": 8, "num_heads": 6, "num_kv_heads": 2, "head_dim": 16, "window": 20}


@pytest.mark.parametrize("name", INTEGERS)
def test_numbers_that_count_are_integers(name):
    """Also those that would be equal to the right one."""
    for wrong in (float(INTEGERS[name]), INTEGERS[name] + 0.5, True, str(INTEGERS[name]), jnp.int32(INTEGERS[name])):
        expected = rf"{name} must be (None or )?an integer of at least 1, got {re.escape(repr(wrong))}"
        with pytest.raises(ValueError, match=expected):
            metadata(**{name: wrong})
    assert getattr(metadata(**{name: np.int64(INTEGERS[name])}), name) == INTEGERS[name]


@pytest.mark.parametrize("name, right", [("num_layers", 2), ("window", 20)])
def test_layers_and_windows_of_attention_are_integers(name, right):
    q, pages = np.zeros((4, 6, 16), np.float32), np.zeros((12, 8, 2, 16), np.float32)
    options: dict[str, Any] = {"layer": 1, "num_layers": 2, "window": 20, "backend": "xla"}
    for wrong in (float(right), True):
        with pytest.raises(ValueError, match=rf"{name} must be (None or )?an integer of at least 1, got {wrong!r}"):
            ragged_paged_attention(q, pages, metadata(window=20), **options | {name: wrong})
    with pytest.raises(ValueError, match=r"layer must be in \[0, 2\), got True"):
        ragged_paged_attention(q, pages, metadata(window=20), **options | {"layer": True})


@pytest.mark.parametrize("backend", ["xla", "triton"])
@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_numpy_arrays_outside_of_jit(backend, kv_dtype):
    batch = ragged_batch([(1, 9), (3, 3)], heads=(2, 1), kv_dtype=kv_dtype)
    options: dict[str, Any] = {"layer": batch.layer, "num_layers": batch.num_layers, "backend": backend}
    starts, contexts, tables = batch.query_starts, batch.context_lens, batch.block_tables
    rows, place = np.zeros((1, 1, 16), np.float32), np.zeros(1, np.int32)
    pages = write_kv(batch.kv_pages, rows, rows, place, place, **options)  # into the trash page
    sizes = {"num_tokens": 4, "page_size": 8, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16}
    built = attention_metadata(starts, contexts, tables, backend=backend, **sizes)
    got = [ragged_paged_attention(batch.q, each, built, interpret=True, **options) for each in (batch.kv_pages, pages)]
    assert relative_error(np.asarray(got[0]), batch.expected()) < 1e-6
    np.testing.assert_array_equal(*map(np.asarray, got))


def test_checks_work_on_shapes_alone():
    """Inside jit the arguments are tracers."""
    with pytest.raises(ValueError, match="page_size must be"):
        jax.eval_shape(lambda table: metadata(block_tables=table, page_size=12), jnp.zeros((2, 4), jnp.int32))


RAW = RawQueries(np.zeros((2, 10, 16), np.float32), 6, np.zeros((2, 8), np.float32), np.zeros((2, 8), np.float32))
SCALE = np.ones(16, np.float32)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_heads": 6.0}, r"q.num_heads must be an integer of at least 1, got 6\.0"),
        ({"num_heads": 11}, r"q.num_heads must be at most the 10 heads of q.qkv, got 11"),
        ({"num_heads": 8}, "metadata must be built for num_heads 8, got one for 6"),
        ({"cos": np.zeros((2, 16), np.float32)}, r"cos must be of shape \[2, 8\], got shape \[2, 16\]"),
        ({"sin": np.zeros((2, 8), np.float16)}, "sin must be of dtype float32, got float16"),
        ({"head_norm": HeadNorm(SCALE, SCALE[:8], 1e-5)}, r"head_norm.k_scale must be of shape \[16\], got"),
        ({"head_norm": HeadNorm(SCALE, SCALE, -1e-5)}, "head_norm.eps must be a finite number at least 0, got -1e-05"),
        ({"late_norm": LateNorm(np.zeros((3, 4), np.float32), 1e-5)}, r"late_norm.x must be of shape \[2, any\], got"),
        ({"late_norm": LateNorm(np.zeros((2, 4), np.float32), float("nan"))}, "late_norm.eps must be a finite number"),
        (
            {"late_norm": LateNorm(np.zeros((2, 4), np.float32), 0.0, np.zeros(96, np.float32))},
            r"late_norm.bias must be of shape \[160\], got shape \[96\]",
        ),
    ],
)
def test_raw_queries(changes, message):
    built = metadata(num_tokens=2, decode_only=True, backend="triton")
    pages = np.zeros((12, 8, 2, 16), np.float32)
    with pytest.raises(ValueError, match=message):
        decode_attention(RAW._replace(**changes), pages, built, layer=1, num_layers=2, backend="triton")


def test_raw_queries_are_for_the_kernel_that_finishes_them():
    for changes in ({"backend": "xla"}, {"backend": "triton", "one_path": True}):
        built = metadata(num_tokens=2, decode_only=True, **changes)
        with pytest.raises(ValueError, match="q must be an array, but for decodes alone on backend triton, got RawQ"):
            pages = np.zeros((12, 8, 2, 16), np.float32)
            decode_attention(RAW, pages, built, layer=1, num_layers=2, backend=changes["backend"])


def test_numbers_of_norms_and_layers_of_writes():
    x = np.zeros((2, 8), np.float32)
    for eps in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="eps must be a finite number at least 0, got"):
            rms_norm(x, x[0], eps=eps)
    pages, rows, place = np.zeros((4, 8, 1, 8), np.float32), np.zeros((1, 1, 8), np.float32), np.zeros(1, np.int32)
    with pytest.raises(ValueError, match=r"layer must be in \[0, 2\), got 2"):
        write_kv(pages, rows, rows, place, place, layer=np.int32(2), num_layers=2)


GPUS = {
    "NVIDIA A10": "8.6",
    "NVIDIA L40S": "8.9",
    "NVIDIA B200": "10.0",
    "NVIDIA GeForce RTX 5090": "12.0",
    "Tesla T4": "7.5",
}


@pytest.fixture(params=GPUS)
def unlisted(request, monkeypatch):
    """A GPU that the tile table doesn't name."""
    device = type("Device", (), {"device_kind": request.param, "compute_capability": GPUS[request.param]})()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    return request.param


def test_a_gpu_without_a_name_in_the_table_has_its_own_capability(unlisted):
    target = default_target()
    assert target.device == unlisted and ".".join(map(str, target.compute_capability)) == GPUS[unlisted]
    assert target.name == ("h100" if unlisted == "NVIDIA B200" else "l4")
    assert target.has_float8 == (unlisted not in ("NVIDIA A10", "Tesla T4"))


def test_tiles_of_a_larger_gpu_are_refused(unlisted):
    for name, target in TARGETS.items():
        arguments = {"backend": "triton", "target": name}
        if default_target().has_what(target):
            assert metadata(**arguments).work.target == target
        else:
            with pytest.raises(ValueError, match=f"target must be None or one that fits the {unlisted} there is, got"):
                metadata(**arguments)
    assert not default_target().has_what(TARGETS["h200"]) or unlisted == "NVIDIA B200"
