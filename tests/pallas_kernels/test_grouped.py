"""Products of groups of rows, of every backend, against numpy in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import group_rows, grouped_product, reference
from pallas_kernels.triton import tiles
from pallas_kernels.triton.grouped import work_of
from tests.pallas_kernels.batches import relative_error

TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-2}
RNG = np.random.default_rng(0)
SIZES = ([3, 0, 20, 1, 0], [0, 0, 0, 0, 0], [0, 0, 40, 0, 0], [17, 16, 15, 33, 1])
"""Rows of the groups: none of some, one, whole tiles, more than a tile."""


def rows(*shape: int, dtype: str = "float32") -> np.ndarray:
    return RNG.standard_normal(shape).astype(jnp.dtype(dtype))


def starts_of(sizes: list[int]) -> np.ndarray:
    return np.cumsum([0, *sizes]).astype(np.int32)


@pytest.mark.parametrize("backend", ["xla", "triton"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_group_is_multiplied_with_its_own_kernel(backend, dtype):
    product = jax.jit(functools.partial(grouped_product, backend=backend, interpret=True))
    x, kernels = rows(90, 40, dtype=dtype), rows(5, 50, 40, dtype=dtype)
    for sizes in SIZES:
        starts = starts_of(sizes)
        got = np.asarray(product(x, kernels, starts))[: starts[-1]]
        assert got.dtype == x.dtype
        want = reference.grouped_product(x, kernels, starts)[: starts[-1]]
        assert relative_error(got, want) < TOLERANCE[dtype] if len(want) else True


def test_what_no_group_has_is_0_on_xla():
    got = grouped_product(rows(40, 8), rows(5, 6, 8), jnp.asarray(starts_of(SIZES[0])), backend="xla")
    assert not np.asarray(got)[sum(SIZES[0]) :].any()


@pytest.mark.parametrize("backend", ["xla", "triton"])
def test_rows_are_taken_of_x_by_their_numbers(backend):
    x, kernels, starts = rows(7, 24), rows(5, 6, 24), starts_of(SIZES[0])
    taken = RNG.integers(0, 7, 24).astype(np.int32)
    got = grouped_product(x, kernels, jnp.asarray(starts), jnp.asarray(taken), backend=backend, interpret=True)
    assert relative_error(np.asarray(got), reference.grouped_product(x[taken], kernels, starts)) < 1e-6


def test_a_row_has_the_same_bits_in_any_company_on_xla():
    """However many rows an expert is given, and wherever the row stands among them."""
    product = jax.jit(functools.partial(grouped_product, backend="xla"))
    x, kernels = rows(90, 72), rows(5, 50, 72)
    alone = np.asarray(product(x[:1], kernels, starts_of([0, 0, 1, 0, 0])))[0]
    for before, beside in ((0, 1), (3, 20), (31, 40)):
        among = np.concatenate([x[1 : 1 + before], x[:1], x[20 : 20 + beside]])
        got = product(among, kernels, starts_of([before // 2, before - before // 2, 1 + beside, 0, 0]))
        assert np.array_equal(np.asarray(got)[before], alone)


def test_pairs_are_put_in_the_order_of_their_experts():
    """The example of the module's docstring."""
    experts = jnp.array([[2, 0], [0, 1], [0, 2], [3, -1]])
    order, starts, places = group_rows(experts, 3)
    assert order.tolist() == [1, 2, 4, 3, 0, 5, 6, 7]
    assert starts.tolist() == [0, 3, 4, 6]
    assert places.tolist() == [4, 0, 1, 3, 2, 5, 6, 7]


@pytest.mark.parametrize("sizes", SIZES)
def test_every_row_of_a_group_is_in_one_block_of_it(sizes):
    starts = starts_of(sizes)
    group, first = (np.asarray(part) for part in work_of(jnp.asarray(starts), 90, 16))
    done = [
        (g, row) for g, f in zip(group, first, strict=True) if g < 5 for row in range(f, min(f + 16, starts[g + 1]))
    ]
    assert done == [(g, row) for g in range(5) for row in range(starts[g], starts[g + 1])]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": rows(3, 9)}, r"x must be of shape \[any, 8\], got shape \[3, 9\]"),
        ({"starts": np.zeros(5, np.int32)}, r"starts must be of shape \[6\]"),
        ({"rows": np.zeros(3, np.float32)}, "rows must be of dtype int32"),
        ({"dtype": "int32"}, "dtype must be float32 or bfloat16 or float16, got 'int32'"),
        ({"dtype": "float"}, "dtype must be float32 or bfloat16 or float16, got 'float'"),
        ({"dtype": "half a float"}, "dtype must be float32 or bfloat16 or float16, got 'half a float'"),
        ({"backend": "native"}, "backend must be None or one of xla, triton, mosaic"),
    ],
)
def test_what_can_not_be_is_refused_by_name(changes, message):
    arguments = {"x": rows(3, 8), "kernels": rows(5, 6, 8), "starts": starts_of([1, 1, 1, 0, 0])}
    with pytest.raises(ValueError, match=message):
        grouped_product(**(arguments | changes))


@pytest.mark.parametrize(
    ("kind", "num_rows", "dtype"), [("few", 3, "bfloat16"), ("many", 90, "bfloat16"), ("float32", 3, "float32")]
)
def test_a_tile_that_does_not_fit_is_refused_while_tracing(kind, num_rows, dtype, monkeypatch):
    wide = getattr(tiles.PRODUCTS, kind)._replace(num_stages=99)
    monkeypatch.setitem(tiles.PRODUCT_TILES, "h200", tiles.PRODUCTS._replace(**{kind: wide}))
    product = functools.partial(grouped_product, backend="triton", interpret=True)
    shapes = (rows(num_rows, 8, dtype=dtype), rows(5, 6, 8, dtype=dtype), starts_of([1, 1, 1, 0, 0]))
    with pytest.raises(ValueError, match=rf"must fit the 232,448 bytes of shared memory .* num_stages=99\) in {dtype}"):
        jax.eval_shape(product, *shapes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": np.zeros(4, np.int32)}, r"experts must be of shape \[any, any\], got shape \[4\]"),
        ({"experts": np.zeros((2, 2), np.float32)}, "experts must be of dtype int8 or .*, got float32"),
        ({"num_groups": 3.0}, r"num_groups must be an integer of at least 1, got 3\.0"),
    ],
)
def test_experts_that_can_not_be_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        group_rows(**({"experts": np.zeros((2, 2), np.int32), "num_groups": 3} | changes))


@pytest.mark.parametrize(("num_rows", "dtype"), [(8, "bfloat16"), (4096, "bfloat16"), (64, "float32")])
def test_the_kernel_lowers_for_h200(num_rows, dtype):
    shapes = [
        jax.ShapeDtypeStruct((max(1, num_rows // 8), 2048), dtype),
        jax.ShapeDtypeStruct((128, 1536, 2048), dtype),
        jax.ShapeDtypeStruct((129,), jnp.int32),
        jax.ShapeDtypeStruct((num_rows,), jnp.int32),
    ]
    h200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("device",), abstract_device=h200)):
        lowered = jax.jit(grouped_product).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("__gpu$xla.gpu.triton") == 1
    assert "stablehlo.while" not in lowered, "a loop outside the kernel breaks the step's CUDA graph"
