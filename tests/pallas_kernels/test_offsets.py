"""Pools so large that an offset of 32 bits doesn't reach all of them. Shapes alone: nothing is allocated."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

from pallas_kernels import QuantizedPages, copy_pages, gather_pages, scatter_pages
from pallas_kernels.triton.offsets import SHORT_BYTES, SIGNED
from tests.pallas_kernels.batches import attend

GIB = 2**30
PAGE = (16, 8, 128)
"""Of 16,384 elements."""
INDEX = jax.ShapeDtypeStruct((4,), jnp.int32)


def pool(num_bytes: int, dtype: str) -> jax.ShapeDtypeStruct:
    number = jnp.dtype(dtype)
    return jax.ShapeDtypeStruct((num_bytes // 16_384 // number.itemsize, *PAGE), number)


def attention_over(pages: jax.ShapeDtypeStruct, *, decode_only: bool = False) -> Any:
    """Shape of what attention returns."""
    quantized = pages.dtype.itemsize == 1
    scales = jax.ShapeDtypeStruct((pages.shape[0], PAGE[1], PAGE[0]), jnp.float32)
    int32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    options: dict[str, Any] = {"layer": 0, "num_layers": 1, "scale": None, "window": None, "soft_cap": None}
    step = functools.partial(attend, decode_only=decode_only, backend="triton", interpret=False, **options)
    q = jax.ShapeDtypeStruct((4, 32, 128), jnp.bfloat16)
    batch = (int32((5,)), int32((4,)), int32((4, 8)), None)
    return jax.eval_shape(step, q, QuantizedPages(pages, scales) if quantized else pages, *batch)


def operands(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Shapes of what the Pallas kernels in a function take and give."""
    found: list[Any] = []

    def look(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            if equation.primitive.name == "pallas_call":
                found.extend(each.aval for each in (*equation.invars, *equation.outvars))
            for inner in jaxprs_in_params(equation.params):
                look(inner)

    look(jax.make_jaxpr(function)(*arguments).jaxpr)
    return found


@pytest.mark.parametrize("decode_only", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_attention_refuses_pages_of_bytes_between_2_and_4_gib(dtype, decode_only):
    for num_bytes in (2 * GIB + 2**16, 3 * GIB, 4 * GIB):
        message = (
            rf"kv_pages.values must be of at most 2,147,483,648 elements of {dtype}, or of more than 4,294,967,296 "
            rf".* got {num_bytes:,}"
        )
        with pytest.raises(ValueError, match=message):
            attention_over(pool(num_bytes, dtype), decode_only=decode_only)
    for num_bytes in (2 * GIB, 4 * GIB + 2**16):
        assert attention_over(pool(num_bytes, dtype), decode_only=decode_only).shape == (4, 32, 128)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_pages_of_wider_elements_have_no_such_gap(dtype):
    assert attention_over(pool(3 * GIB, dtype)).shape == (4, 32, 128)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "float8_e4m3fn", "bfloat16"])
def test_pages_move_in_elements_that_offsets_reach(dtype):
    def move(kv: Any, sources: Any, destinations: Any) -> Any:
        kv = copy_pages(kv, sources, destinations, backend="triton")
        taken = gather_pages(kv, sources, backend="triton")
        return scatter_pages(kv, destinations, taken, backend="triton")

    found = operands(move, pool(4 * GIB, dtype), INDEX, INDEX)
    assert sum(each.size * each.dtype.itemsize == SHORT_BYTES for each in found) == 5, "pools in and out"
    assert all(each.size <= SIGNED for each in found)


def test_a_pool_whose_pages_are_no_whole_words_is_refused_there():
    odd = jax.ShapeDtypeStruct((3 * GIB // 3, 3), jnp.int8)
    with pytest.raises(ValueError, match=r"kv must be of at most 2,147,483,648 elements of int8, .* got 3,221,225,472"):
        jax.eval_shape(functools.partial(copy_pages, backend="triton"), odd, INDEX, INDEX)
