"""The kernels as functions of jax arrays. Shapes and dtypes are checked while tracing; :func:`load` comes first.

Weights of all layers are one array of which ``layer``, traced or not, picks a part: a loop over layers then is one call
in the program, and no array is sliced or copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32, Shaped

from pallas_kernels.checks import require, require_array
from pallas_kernels.native.library import require_loaded, target
from pallas_kernels.native.panels import panel_shape
from pallas_kernels.pages import KVPages, QuantizedPages, values_of

Activation = Literal["silu", "gelu_tanh"]
WEIGHT_DTYPES = ("float32", "bfloat16", "float16", "int8")
PAGE_DTYPES = ("float32", "bfloat16", "float16", "uint16")
MAX_HEAD_DIM = 512
_ACTIVATIONS = {None: 0, "silu": 1, "gelu_tanh": 2}


Order = Literal["rows", "pairs"]
"""How keys and values lie in a page, which is as large either way:

- rows: as its shape [page_size, K, D] says.
- pairs: as attention multiplies them where the CPU multiplies bfloat16. 16 positions of a head lie in one run,
  [page_size / 16, K, run]: of keys [D / 2, 16 positions, 2 features], of values [8, D, 2 positions].
"""
_SLAB = 16


class Tables(NamedTuple):
    """A ragged batch as :func:`pallas_kernels.attention_metadata` describes it. S sequences, P pages each."""

    query_starts: Int32[Array, "S+1"]
    context_lens: Int32[Array, "S"]
    block_tables: Int32[Array, "S P"]


def product(
    x: Float[Array, "T I"],
    kernels: Shaped[Array, "L P I 16"],
    *,
    num_outputs: int,
    layer: int | Int[Array, ""] = 0,
    num_rows: int | Int[Array, ""] | None = None,
    scales: Float[Array, "L O"] | None = None,
    biases: Float[Array, "L O"] | None = None,
    norms: Float[Array, "L I"] | None = None,
    eps: float = 0.0,
    activation: Activation | None = None,
    residual: Float[Array, "T O"] | None = None,
) -> Float[Array, "T N"]:
    """``h @ kernel.T + bias + residual`` in float32, where h is x or its RMS norm.

    With an activation, the kernel holds gate and up, O = 2N, and the result is ``activation(gate) * up``; otherwise
    O = N. A row's bits don't depend on the other rows or on how many there are. Where the CPU multiplies bfloat16
    (variant avx512_bf16) and the kernel is that, h is rounded to it first.

    Arguments:
        x: float32.
        kernels: of all layers, each in the panels of :func:`to_panels`.
        num_outputs: N.
        layer: which of them.
        num_rows: rows that are computed, the others come out as 0; None: all.
        scales: of int8 kernels, by output.
        biases: float32.
        norms: float32 scales of the RMS norm of x.
        eps: of the norm.
        residual: float32, added last.

    Raises:
        ValueError: a shape or dtype can't be; the message names the argument.
    """
    require_array(x, "x", (None, None), dtypes=("float32",))
    (T, I), N = x.shape, num_outputs  # noqa: E741  # the letter of the shape
    O = N if activation is None else 2 * N  # noqa: E741  # the letter of the shape
    require(I >= 1, "x", "of at least one feature", I)
    shape = panel_shape(O, I, gated=activation is not None)
    require_array(kernels, "kernels", (None, *shape), dtypes=WEIGHT_DTYPES)
    L = kernels.shape[0]
    require(L >= 1, "kernels", "of at least one layer", L)
    require(activation is None or residual is None, "residual", "None beside an activation", "an array")
    require((scales is not None) == (kernels.dtype == jnp.int8), "scales", "given for int8 kernels alone", scales)
    return jax.ffi.ffi_call(target("jaxcb_product"), jax.ShapeDtypeStruct((T, N), jnp.float32))(
        x,
        kernels,
        _optional(scales, "scales", L, O),
        _optional(biases, "biases", L, O),
        _optional(norms, "norms", L, I),
        _optional(residual, "residual", T, N),
        _int32(layer),
        _int32(T if num_rows is None else num_rows),
        activation=np.int64(_ACTIVATIONS[activation]),
        eps=np.float32(eps),
    )


def grouped_product(
    x: Float[Array, "R I"],
    kernels: Shaped[Array, "L G P I 16"],
    starts: Int32[Array, "G+1"],
    *,
    num_outputs: int,
    layer: int | Int[Array, ""] = 0,
    scales: Float[Array, "L G O"] | None = None,
    norms: Float[Array, "L I"] | None = None,
    eps: float = 0.0,
    activation: Activation | None = None,
) -> Float[Array, "R N"]:
    """:func:`product` of groups of rows: of group g, rows ``starts[g]`` to ``starts[g + 1]``, with its own kernel.

    A row's bits are those of a product of that row alone. Kernels of groups without rows aren't read.

    Arguments:
        x: float32.
        kernels: of all layers and groups, each in the panels of :func:`to_panels`.
        starts: from 0 to at most R; rows past the last one come out as 0.
        num_outputs, layer, scales, norms, eps, activation: as for :func:`product`.

    Raises:
        ValueError: a shape or dtype can't be; the message names the argument.
    """
    require_array(x, "x", (None, None), dtypes=("float32",))
    (R, I), N = x.shape, num_outputs  # noqa: E741  # the letter of the shape
    O = N if activation is None else 2 * N  # noqa: E741  # the letter of the shape
    require(I >= 1, "x", "of at least one feature", I)
    shape = panel_shape(O, I, gated=activation is not None)
    require_array(kernels, "kernels", (None, None, *shape), dtypes=WEIGHT_DTYPES)
    L, G = kernels.shape[:2]
    require(L >= 1 and G >= 1, "kernels", "of at least one layer and group", f"{L} and {G}")
    require_array(starts, "starts", (G + 1,), dtypes=("int32",))
    require((scales is not None) == (kernels.dtype == jnp.int8), "scales", "given for int8 kernels alone", scales)
    return jax.ffi.ffi_call(target("jaxcb_grouped_product"), jax.ShapeDtypeStruct((R, N), jnp.float32))(
        x,
        kernels,
        _optional(scales, "scales", L, G, O),
        _optional(norms, "norms", L, I),
        starts,
        _int32(layer),
        activation=np.int64(_ACTIVATIONS[activation]),
        eps=np.float32(eps),
    )


def attention(
    q: Float[Array, "T H D"],
    kv_pages: KVPages,
    tables: Tables,
    *,
    layer: int | Int[Array, ""],
    num_layers: int,
    scale: float | None = None,
    window: int | Int[Array, ""] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "H"] | None = None,
    order: Order = "rows",
) -> Float[Array, "T H D"]:
    """:func:`pallas_kernels.ragged_paged_attention` with float32 queries over pages that hold this step's keys.

    Arguments:
        window: may be traced; None or 0: all positions.
        sinks: scores of a position without a value, one a head (gpt-oss).
        order: of the numbers in a page; "pairs" where :func:`order_of` says so.

    Raises:
        ValueError: a shape or dtype can't be; the message names the argument.
    """
    values, scales = _checked_pages(kv_pages, num_layers)
    K, D = values.shape[2:]
    require_array(q, "q", (None, None, D), dtypes=("float32",))
    require(q.shape[1] % K == 0, "q", f"of a multiple of {K} heads", q.shape[1])
    pairs = _are_pairs(order, kv_pages)
    return jax.ffi.ffi_call(target("jaxcb_attention"), jax.ShapeDtypeStruct(q.shape, jnp.float32))(
        q,
        _optional(sinks, "sinks", q.shape[1]),
        *_checked(tables),
        _int32(layer),
        _int32(window or 0 if isinstance(window, int | None) else window),
        values,
        scales,
        pairs=pairs,
        num_layers=np.int64(num_layers),
        scale=np.float32(D**-0.5 if scale is None else scale),
        soft_cap=np.float32(soft_cap or 0),
    )


def place_and_attend(
    qkv: Float[Array, "T (H+2K)*D"],
    cos: Float[Array, "T R/2"],
    sin: Float[Array, "T R/2"],
    kv_pages: KVPages,
    tables: Tables,
    *,
    layer: int | Int[Array, ""],
    num_layers: int,
    q_norm: Float[Array, "D"] | None = None,
    k_norm: Float[Array, "D"] | None = None,
    eps: float = 0.0,
    scale: float | None = None,
    window: int | Int[Array, ""] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "H"] | None = None,
    order: Order = "rows",
) -> tuple[Float[Array, "T H*D"], KVPages]:
    """Normalise and rotate queries and keys, write keys and values into their pages in place, and attend.

    Arguments:
        qkv: queries, keys and values of every token as the projection left them, float32.
        cos, sin: of the angles of every token's position; pairs are (i, i + R/2) of a head's first R features.
        kv_pages: given up by the caller: written in place where XLA can. Into int8 :class:`QuantizedPages` every key
            and value is rounded by itself, with a scale of its own.
        q_norm, k_norm: scales of the RMS norm of every head; None: none.
        scale, window, soft_cap, sinks, order: as for :func:`attention`. What an order wrote, the same one reads.

    Returns:
        Attention of every token (0 for padding), and the pages. Padding tokens write nothing.

    Raises:
        ValueError: a shape or dtype can't be; the message names the argument.
    """
    values, scales = _checked_pages(kv_pages, num_layers)
    K, D = values.shape[2:]
    require_array(qkv, "qkv", (None, None), dtypes=("float32",))
    T, width = qkv.shape
    H = width // D - 2 * K
    require(width == (H + 2 * K) * D and H >= 1 and H % K == 0, "qkv", f"of (n * {K} + 2 * {K}) * {D} features", width)
    require_array(cos, "cos", (T, None), dtypes=("float32",))
    require_array(sin, "sin", cos.shape, dtypes=("float32",))
    require(2 * cos.shape[1] <= D, "cos", f"of at most {D // 2} angles", cos.shape[1])
    out, values, scales = jax.ffi.ffi_call(
        target("jaxcb_place_and_attend"),
        (
            jax.ShapeDtypeStruct((T, H * D), jnp.float32),
            jax.ShapeDtypeStruct(values.shape, values.dtype),
            jax.ShapeDtypeStruct(scales.shape, scales.dtype),
        ),
        input_output_aliases={11: 1, 12: 2},
    )(
        qkv,
        cos,
        sin,
        _optional(q_norm, "q_norm", D),
        _optional(k_norm, "k_norm", D),
        _optional(sinks, "sinks", H),
        *_checked(tables),
        _int32(layer),
        _int32(window or 0 if isinstance(window, int | None) else window),
        values,
        scales,
        pairs=_are_pairs(order, kv_pages),
        num_heads=np.int64(H),
        num_layers=np.int64(num_layers),
        scale=np.float32(D**-0.5 if scale is None else scale),
        soft_cap=np.float32(soft_cap or 0),
        eps=np.float32(eps),
    )
    return out, QuantizedPages(values, scales) if isinstance(kv_pages, QuantizedPages) else values


def order_of(kv_pages: Any) -> Order:
    """The fastest order for pages of that shape and dtype on this CPU.

    Arguments:
        kv_pages: the pool in any shape that ends in [page_size, K, D], or what describes it.

    Raises:
        NativeError: no library is loaded.
    """
    library = require_loaded()
    if isinstance(kv_pages, QuantizedPages) or kv_pages.dtype not in (jnp.bfloat16, jnp.uint16):
        return "rows"
    page_size, _, D = kv_pages.shape[-3:]
    fits = page_size % _SLAB == 0 and D % (2 * _SLAB) == 0
    return "pairs" if library.variant == "avx512_bf16" and fits else "rows"


def untouched(shape: Sequence[int], dtype: Any) -> Shaped[Array, "..."]:
    """An array that nothing has been written to: what is in it is of no meaning, and may be NaN.

    A large one takes up memory only as it is written to, in huge pages where the system has them.
    """
    return jax.ffi.ffi_call(target("jaxcb_untouched"), jax.ShapeDtypeStruct(tuple(shape), dtype))()


def _checked_pages(
    kv_pages: KVPages, num_layers: int
) -> tuple[Shaped[Array, "F page_size K D"], Float[Array, "F K page_size"]]:
    """Values and scales; of plain pages scales of no elements, for the kernel to see that there are none."""
    values, quantized = values_of(kv_pages), isinstance(kv_pages, QuantizedPages)
    name, dtypes = ("kv_pages.values", ("int8",)) if quantized else ("kv_pages", PAGE_DTYPES)
    require_array(values, name, (None, None, None, None), dtypes=dtypes)
    require(values.shape[3] <= MAX_HEAD_DIM, name, f"of a head size up to {MAX_HEAD_DIM}", values.shape[3])
    require(values.shape[0] % (2 * num_layers) == 0, name, f"of 2 * {num_layers} * N pages", values.shape[0])
    if not isinstance(kv_pages, QuantizedPages):
        return values, jnp.zeros((0, 0, 0), jnp.float32)
    F, page_size, K, _ = values.shape
    require_array(kv_pages.scales, "kv_pages.scales", (F, K, page_size), dtypes=("float32",))
    return values, kv_pages.scales


def _are_pairs(order: Order, kv_pages: KVPages) -> np.bool_:
    require(order in ("rows", "pairs"), "order", '"rows" or "pairs"', repr(order))
    best = order_of(kv_pages)
    require(order in ("rows", best), "order", '"rows" for such pages on this CPU', repr(order))
    return np.bool_(order == "pairs")


def _checked(tables: Tables) -> Tables:
    require_array(tables.block_tables, "block_tables", (None, None), dtypes=("int32",))
    S = tables.block_tables.shape[0]
    require_array(tables.context_lens, "context_lens", (S,), dtypes=("int32",))
    require_array(tables.query_starts, "query_starts", (S + 1,), dtypes=("int32",))
    return tables


def _optional(array: Float[Array, "..."] | None, name: str, *shape: int) -> Float[Array, "..."]:
    """The array, or one of no elements for the kernel to see that there is none."""
    if array is None:
        return jnp.zeros(0, jnp.float32)
    require_array(array, name, shape, dtypes=("float32",))
    return array


def _int32(value: int | Int[Array, ""]) -> Int32[Array, ""]:
    return jnp.asarray(value, jnp.int32)
