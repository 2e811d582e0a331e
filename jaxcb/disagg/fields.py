"""Fields: what stands in a message of another process, each read as what it has to be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxcb.errors import PeerError
from jaxcb.validation import shown


class Fields:
    """Every method raises PeerError, which names the field, where it is missing or is something else."""

    def __init__(self, message: Mapping[str, Any]):
        self._message = message

    def has(self, name: str) -> bool:
        """It is there, and not null."""
        return self._message.get(name) is not None

    def text(self, name: str) -> str:
        return self._of(name, str)

    def flag(self, name: str) -> bool:
        return self._of(name, bool)

    def part(self, name: str) -> dict[str, Any]:
        """An object."""
        return self._of(name, dict)

    def integer(self, name: str, low: int, high: int) -> int:
        """Within [low, high]."""
        value = self._of(name, int)
        if not low <= value <= high:
            raise PeerError(f"its {name} must be in [{low}, {high}], got {shown(value)}")
        return value

    def number(self, name: str) -> float:
        """A finite one."""
        value = self._of(name, (int, float))
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise PeerError(f"its {name} must be finite, got {shown(value)}")
        return number

    def _of(self, name: str, kind: Any) -> Any:
        value = self._message.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise PeerError(f"its {name} can't be {shown(value)}")
        return value
