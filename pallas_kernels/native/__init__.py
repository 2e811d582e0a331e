"""The native backend: C++ kernels for CPUs, called by XLA through jax.ffi. Attention over pages, and products.

Nothing here is compiled or loaded by an import: :func:`load` does it, or says why it can't be done.
"""

from pallas_kernels.native.build import NativeError
from pallas_kernels.native.library import Library, load, loaded
from pallas_kernels.native.ops import (
    WEIGHT_DTYPES,
    Order,
    Tables,
    attention,
    grouped_product,
    order_of,
    place_and_attend,
    product,
    untouched,
)
from pallas_kernels.native.panels import panel_shape, take_rows, to_panels

__all__ = [
    "WEIGHT_DTYPES",
    "Library",
    "NativeError",
    "Order",
    "Tables",
    "attention",
    "grouped_product",
    "load",
    "loaded",
    "order_of",
    "panel_shape",
    "place_and_attend",
    "product",
    "take_rows",
    "to_panels",
    "untouched",
]
