"""How far into an array a triton kernel can point: Pallas counts elements, up to 4 GiB in 32 bits, above in 64."""

from __future__ import annotations

from jaxtyping import Array, Shaped

from pallas_kernels.checks import require

SIGNED = 2**31
"""Elements that an offset of 32 bits counts: it has a sign, so that of bytes it reaches half of 4 GiB."""
SHORT_BYTES = 2**32
"""Largest array whose offsets Pallas gives 32 bits (``_compute_offsets_from_indices`` of its Triton lowering)."""


def require_offsets_fit(array: Shaped[Array, "..."], argument: str) -> None:
    """Raise ValueError if a kernel would take wrong addresses in ``array``. Only elements of one byte are too many."""
    short = array.size * array.dtype.itemsize <= SHORT_BYTES
    require(
        not (short and array.size > SIGNED),
        argument,
        f"of at most {SIGNED:,} elements of {array.dtype}, or of more than {SHORT_BYTES:,} (a triton kernel's offsets "
        "between have too few bits)",
        f"{array.size:,}",
    )
