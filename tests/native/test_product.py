"""Native products against float64, and the rule that a row's bits depend on that row alone."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import native

pytestmark = pytest.mark.native
ROUNDING = 2.0**-24


def inputs(seed: int, rows: int, size_in: int, size_out: int, dtype: str) -> tuple[np.ndarray, jax.Array]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, size_in), np.float32)
    if dtype == "int8":
        return x, jnp.asarray(rng.integers(-127, 128, (size_out, size_in)), jnp.int8)
    return x, jnp.asarray(rng.standard_normal((size_out, size_in)), dtype)


def exact(x: np.ndarray, weights: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64, and how far float32 sums in any order may be from it."""
    w = np.asarray(weights.astype(jnp.float32)).astype(np.float64)
    rounding = ROUNDING * (x.shape[1] / 8 + 8)
    library = native.loaded()
    if weights.dtype == jnp.bfloat16 and library is not None and library.variant == "avx512_bf16":
        rounding += 2.0**-9  # of x
    bound = np.abs(x).astype(np.float64) @ np.abs(w).T * rounding
    return x.astype(np.float64) @ w.T, bound + 1e-30


def product(x: Any, weights: jax.Array, activation: native.ops.Activation | None = None, **options: Any) -> np.ndarray:
    """Of a kernel in rows."""
    kernel = native.to_panels(weights, gated=activation is not None)
    num_outputs = weights.shape[0] // (1 if activation is None else 2)
    return np.asarray(native.product(x, kernel[None], num_outputs=num_outputs, activation=activation, **options))


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 70) | st.integers(90, 210),
    size_in=st.sampled_from([1, 3, 8, 21, 64, 100, 576, 769, 1700]),
    size_out=st.integers(1, 100),
    dtype=st.sampled_from(native.WEIGHT_DTYPES),
    padding=st.integers(0, 3),
    seed=st.integers(0, 2**31),
)
def test_plain_product_of_any_shape(rows, size_in, size_out, dtype, padding, seed):
    x, weights = inputs(seed, rows + padding, size_in, size_out, dtype)
    x[rows:] = np.nan
    rng = np.random.default_rng(seed + 1)
    residual, bias, scale = (
        rng.standard_normal(s, np.float32) for s in ((rows + padding, size_out), size_out, size_out)
    )
    scales = scale[None] if dtype == "int8" else None
    got = product(x, weights, num_rows=rows, biases=bias[None], residual=residual, scales=scales)
    wanted, bound = exact(x[:rows], weights)
    if scales is not None:
        wanted, bound = wanted * scale, bound * np.abs(scale)
    wanted = wanted + bias + residual[:rows]
    assert (np.abs(got[:rows] - wanted) <= 2 * bound + 4 * ROUNDING * np.abs(wanted) + 1e-6).all()
    assert not got[rows:].any(), "padding rows are 0"


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("rows, size_in, half", [(1, 21, 13), (5, 64, 48), (50, 64, 100), (130, 1000, 16)])
def test_gate_and_up(activation, rows, size_in, half):
    x, weights = inputs(0, rows, size_in, 2 * half, "float32")
    x /= max(1, size_in / 64)  # sums of about one size
    bias = np.linspace(-2, 2, 2 * half, dtype=np.float32)
    both = x.astype(np.float64) @ np.asarray(weights, np.float64).T + bias
    gate, up = both[:, :half], both[:, half:]
    if activation == "silu":
        wanted = gate / (1 + np.exp(-gate)) * up
    else:
        wanted = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    got = product(x, weights, activation, biases=bias[None])
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("rows", [1, 5, 70])
def test_norm_of_the_input(rows):
    x, weights = inputs(1, rows, 100, 30, "float32")
    scale = np.linspace(0.5, 1.5, 100, dtype=np.float32)
    x64 = x.astype(np.float64)
    wanted = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-5) * scale @ np.asarray(weights, np.float64).T
    got = product(x, weights, norms=scale[None], eps=1e-5)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_a_traced_layer_picks_its_weights():
    x, _ = inputs(2, 3, 16, 8, "float32")
    kernels = np.stack([native.to_panels(inputs(i, 1, 16, 8, "float32")[1]) for i in range(3)])
    biases = np.stack([np.full(8, i, np.float32) for i in range(3)])
    pick = jax.jit(lambda i: native.product(x, kernels, num_outputs=8, biases=biases, layer=i))
    for i in range(3):
        alone = native.product(x, kernels[i : i + 1], num_outputs=8, biases=biases[i : i + 1])
        np.testing.assert_array_equal(pick(i), alone)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("size_in", [64, 1001])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_row_has_the_same_bits_in_any_company(dtype, size_in, activation):
    x, weights = inputs(3, 200, size_in, 120, dtype)
    norm = np.ones(size_in, np.float32)

    def rows_of(x: np.ndarray, **options: Any) -> np.ndarray:
        return product(x, weights, activation, norms=norm[None], **options)

    alone = np.concatenate([rows_of(x[i : i + 1]) for i in range(200)])
    for count in (2, 3, 4, 5, 6, 7, 8, 13, 31, 95, 96, 97, 193, 200):
        np.testing.assert_array_equal(rows_of(x[:count]).view(np.uint32), alone[:count].view(np.uint32))
        np.testing.assert_array_equal(rows_of(x, num_rows=count)[:count].view(np.uint32), alone[:count].view(np.uint32))
    np.testing.assert_array_equal(rows_of(x[::-1])[::-1].view(np.uint32), alone.view(np.uint32))


@pytest.mark.parametrize("dtype", native.WEIGHT_DTYPES)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_groups_rows_are_those_of_its_own_product(dtype, activation):
    """To the bit, whatever else is there: groups without rows, and rows of no group."""
    rng, (num_layers, num_groups, size_in, size_out) = np.random.default_rng(6), (2, 4, 37, 24)
    x, starts = rng.standard_normal((60, size_in), np.float32), np.array([0, 5, 5, 42, 50], np.int32)
    weights = [
        [inputs(10 * i + j, 1, size_in, size_out, dtype)[1] for j in range(num_groups)] for i in range(num_layers)
    ]
    gated = activation is not None
    kernels = np.stack([np.stack([native.to_panels(kernel, gated=gated) for kernel in layer]) for layer in weights])
    scales = rng.random((num_layers, num_groups, size_out), np.float32) if dtype == "int8" else None
    norms = rng.random((num_layers, size_in), np.float32)
    num_outputs = size_out // 2 if gated else size_out
    grouped = jax.jit(
        lambda layer: native.grouped_product(
            x,
            kernels,
            starts,
            num_outputs=num_outputs,
            layer=layer,
            scales=scales,
            norms=norms,
            eps=1e-5,
            activation=activation,
        )
    )
    for layer in range(num_layers):
        got = np.asarray(grouped(layer))
        for group, (begin, end) in enumerate(itertools.pairwise(starts)):
            scale = None if scales is None else scales[layer, group][None]
            alone = product(
                x[begin:end], weights[layer][group], activation, scales=scale, norms=norms[layer][None], eps=1e-5
            )
            np.testing.assert_array_equal(got[begin:end], alone)
        assert not got[starts[-1] :].any()


def test_calls_from_several_threads_do_not_disturb_each_other():
    x, weights = inputs(4, 60, 100, 120, "bfloat16")
    norm = np.ones(100, np.float32)
    kernel = native.to_panels(weights, gated=True)[None]
    gated = jax.jit(lambda rows: native.product(rows, kernel, num_outputs=60, activation="silu", norms=norm[None]))
    parts = [x[i : i + 30] for i in range(0, 31, 10)]
    wanted = [np.asarray(gated(part)) for part in parts]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(20):
            for got, want in zip(threads.map(gated, parts), wanted, strict=True):
                np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", native.WEIGHT_DTYPES)
@pytest.mark.parametrize("num_rows", [1, 16, 37])
def test_rows_come_back_out_of_panels(dtype, num_rows):
    _, weights = inputs(5, 1, 21, num_rows, dtype)
    panels = native.to_panels(weights)
    assert panels.shape == native.panel_shape(num_rows, 21) and panels.dtype == weights.dtype
    ids = np.array([0, num_rows - 1, num_rows // 2, 0])
    np.testing.assert_array_equal(native.take_rows(jnp.asarray(panels), ids), weights[ids].astype(jnp.float32))
    past = np.arange(num_rows, 16 * len(panels))
    assert not np.asarray(native.take_rows(jnp.asarray(panels), past)).any(), "the last panel is filled up with zeros"


def test_panels_of_another_dtype_or_shape_are_not_filled():
    weights = np.ones((20, 3), np.float32)
    for out in (np.zeros((2, 3, 16), np.uint16), np.zeros((3, 3, 16), np.float32)):
        with pytest.raises(ValueError, match=r"out must be float32 \[2, 3, 16\]"):
            native.to_panels(weights, out=out)


PANELS = np.zeros((1, 1, 8, 16), np.float32)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": np.zeros((2, 8), np.float16)}, "x must be of dtype float32, got float16"),
        ({"kernels": PANELS[0]}, r"kernels must be of shape \[any, 1, 8, 16\], got shape \[1, 8, 16\]"),
        ({"num_outputs": 17}, r"kernels must be of shape \[any, 2, 8, 16\], got shape \[1, 1, 8, 16\]"),
        ({"activation": "silu"}, r"kernels must be of shape \[any, 2, 8, 16\]"),
        ({"kernels": PANELS.astype(np.int32)}, "kernels must be of dtype float32 or .* got int32"),
        ({"kernels": PANELS[:0]}, "kernels must be of at least one layer, got 0"),
        (
            {"x": np.zeros((2, 0), np.float32), "kernels": np.zeros((1, 1, 0, 16), np.float32)},
            "x must be of at least one feature, got 0",
        ),
        ({"kernels": PANELS.astype(np.int8)}, "scales must be given for int8 kernels alone, got None"),
        ({"biases": np.zeros((1, 5), np.float32)}, r"biases must be of shape \[1, 4\]"),
        ({"norms": np.zeros((2, 8), np.float32)}, r"norms must be of shape \[1, 8\], got shape \[2, 8\]"),
        ({"residual": np.zeros((2, 5), np.float32)}, r"residual must be of shape \[2, 4\]"),
        (
            {"kernels": np.zeros((1, 2, 8, 16), np.float32), "residual": PANELS, "activation": "silu"},
            "residual must be None beside",
        ),
    ],
)
def test_what_can_not_be_is_refused_while_tracing(change, message):
    arguments = {"x": np.zeros((2, 8), np.float32), "kernels": PANELS, "num_outputs": 4} | change
    with pytest.raises(ValueError, match=message):
        native.product(arguments.pop("x"), arguments.pop("kernels"), **arguments)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": np.zeros((2, 7), np.float32)}, r"kernels must be of shape \[any, any, 1, 7, 16\]"),
        ({"kernels": PANELS}, r"kernels must be of shape \[any, any, 1, 8, 16\], got shape \[1, 1, 8, 16\]"),
        ({"starts": np.zeros(3, np.int32)}, r"starts must be of shape \[2\], got shape \[3\]"),
        ({"scales": np.zeros((1, 1, 4), np.float32)}, "scales must be given for int8 kernels alone"),
        ({"norms": np.zeros((1, 7), np.float32)}, r"norms must be of shape \[1, 8\]"),
    ],
)
def test_what_groups_can_not_be_is_refused_while_tracing(change, message):
    arguments = {
        "x": np.zeros((2, 8), np.float32),
        "kernels": PANELS[None],
        "starts": np.array([0, 2], np.int32),
        "num_outputs": 4,
    } | change
    with pytest.raises(ValueError, match=message):
        native.grouped_product(arguments.pop("x"), arguments.pop("kernels"), arguments.pop("starts"), **arguments)


@pytest.mark.parametrize("starts", [[1, 2], [0, 3], [2, 1], [0, -1]])
def test_groups_that_leave_their_rows_are_an_error_and_read_nothing(starts):
    with pytest.raises(jax.errors.JaxRuntimeError, match="starts must"):
        np.asarray(
            native.grouped_product(
                np.zeros((2, 8), np.float32), PANELS[None], np.array(starts, np.int32), num_outputs=4
            )
        )
