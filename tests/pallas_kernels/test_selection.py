"""Top-k and top-p by a threshold, against sorting: both backends, the triton kernel in Pallas's interpreter."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from pallas_kernels import Backend, least_kept_weight, reference
from pallas_kernels.triton.selection import LANES, SLOTS

BACKENDS: tuple[Backend, ...] = ("xla", "triton")


run = jax.jit(least_kept_weight, static_argnames=("backend", "interpret"))


def found(weights: Any, top_k: Any, top_p: Any, backend: Backend) -> np.ndarray:
    rows = len(weights)
    arguments = (
        jnp.asarray(weights, jnp.float32),
        jnp.broadcast_to(jnp.asarray(top_k, jnp.int32), rows),
        jnp.broadcast_to(jnp.asarray(top_p, jnp.float32), rows),
    )
    return np.asarray(run(*arguments, backend=backend, interpret=backend == "triton"))


def exact(rng: np.random.Generator, shape: tuple[int, int], steep: float, zeros: float) -> np.ndarray:
    """Weights of a few bits, so that every sum of them is exact in any order, with many ties; the likeliest has 1."""
    weights = np.ceil(rng.random(shape) ** steep * 64) / 64
    weights[rng.random(shape) < zeros] = 0
    weights[:, rng.integers(shape[1])] = 1
    return weights.astype(np.float32)


def softmax_like(rng: np.random.Generator, shape: tuple[int, int], deviation: float) -> np.ndarray:
    logits = rng.standard_normal(shape) * deviation
    return np.exp(logits - logits.max(-1, keepdims=True)).astype(np.float32)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from((1, 7, 1000, 5000)),
    steep=st.sampled_from((0.3, 3.0, 30.0)),
    zeros=st.sampled_from((0.0, 0.5, 1.0)),
)
def test_it_keeps_what_sorting_keeps_ties_included(seed, size, steep, zeros):
    note(f"seed {seed}")
    rng = np.random.default_rng(seed)
    weights = exact(rng, (8, size), steep, zeros)
    top_k = rng.choice([0, 1, 2, 50, size - 1, size, size + 1, 2**31 - 1], 8).astype(np.int32)
    top_p = rng.choice([0.0, 1e-40, 0.125, 0.5, 0.75, 0.96875, 1.0], 8).astype(np.float32)
    expected = reference.least_kept_weight(weights, top_k, top_p)
    for backend in BACKENDS:
        np.testing.assert_array_equal(found(weights, top_k, top_p, backend), expected)


@pytest.mark.parametrize("deviation", [0.01, 1.0, 3.0, 12.0])
def test_the_fewest_weights_whose_share_reaches_top_p(deviation):
    """Of 40,000 weights: steep rows are gathered, flat ones overflow a lane and are surveyed whole."""
    weights = softmax_like(np.random.default_rng(3), (4, 40_000), deviation)
    top_k, top_p = np.array([0, 100, 0, 20_000], np.int32), np.array([0.9, 0.5, 0.3, 0.999], np.float32)
    for row, k, share, least in zip(weights, top_k, top_p, found(weights, top_k, top_p, "triton"), strict=True):
        row = row[row >= (np.sort(row)[-k] if k else 0)].astype(np.float64)
        goal = share * row.sum()
        assert row[row >= least].sum() >= goal * (1 - 1e-6)
        assert row[row > least].sum() < goal * (1 + 1e-6)


def test_a_lane_that_overflows_loses_nothing():
    """All that is near the threshold lies in one lane, in more weights than it has slots."""
    weights = np.full((1, LANES * (SLOTS + 9)), 1e-6, np.float32)
    weights[0, 5::LANES] = 1 - np.arange(SLOTS + 9) / 64
    for k in (1, SLOTS, SLOTS + 1, SLOTS + 9):
        assert found(weights, k, 1.0, "triton") == np.float32(1 - (k - 1) / 64)


def test_thresholds_at_both_ends_of_what_a_float_holds():
    weights = np.zeros((3, 3000), np.float32)
    weights[0, :4] = 1, 2.0**-13, 2.0**-126, 2.0**-130  # the last is not a normal number
    weights[1, :4] = 1, np.nextafter(np.float32(0.5), np.float32(0)), 0.5, 2.0**-13
    for k, expected in (
        (1, [1, 1, 0]),
        (2, [2.0**-13, 0.5, 0]),
        (3, [2.0**-126, weights[1, 1], 0]),
        (4, [0, 2**-13, 0]),
    ):
        np.testing.assert_array_equal(found(weights, k, 1.0, "triton"), np.float32(expected))


def test_a_row_of_no_numbers_ends_and_leaves_others_alone():
    weights = softmax_like(np.random.default_rng(5), (3, 5000), 3.0)
    alone = found(weights, 50, 0.9, "triton")
    weights[1, ::7] = np.nan
    np.testing.assert_array_equal(found(weights, 50, 0.9, "triton")[::2], alone[::2])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"weights": np.ones((2, 5), np.float16)}, "weights must be of dtype float32, got float16"),
        ({"top_k": np.ones(3, np.int32)}, r"top_k must be of shape \[2\], got shape \[3\]"),
        ({"top_p": np.ones(2, np.int32)}, "top_p must be of dtype float32, got int32"),
    ],
)
def test_bad_arguments_are_refused(changes, message):
    good = {"weights": np.ones((2, 5), np.float32), "top_k": np.ones(2, np.int32), "top_p": np.ones(2, np.float32)}
    with pytest.raises(ValueError, match=message):
        least_kept_weight(**good | changes)
