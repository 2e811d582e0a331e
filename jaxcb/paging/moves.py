"""PageMoves: copies of whole pages that the device makes before a step, in this order."""

from __future__ import annotations

import dataclasses

Pairs = list[tuple[int, int]]


@dataclasses.dataclass(slots=True)
class PageMoves:
    """Pages out to host memory, then pages in from there, then copies on the device; each list is one batch.

    The order makes it right to reuse a device page in the very step that moves its content out.
    """

    out: Pairs = dataclasses.field(default_factory=list)
    """(device page, host page)"""
    into: Pairs = dataclasses.field(default_factory=list)
    """(host page, device page)"""
    copies: Pairs = dataclasses.field(default_factory=list)
    """(device page read, device page written)"""

    def __bool__(self) -> bool:
        return bool(self.out or self.into or self.copies)
