"""Tables in which every two values of different features meet in some row."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def all_pairs(
    features: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool] = lambda row: True, *, samples: int = 3000
) -> list[Row]:
    """Rows of one value a feature, such that every pair of values that an allowed row can hold is in one of them.

    Greedy, from random rows: each holds as many new pairs as any of them can, so most pairs are in the first ones.
    """
    rng = random.Random(0)
    rows = [{name: rng.choice(values) for name, values in features.items()} for _ in range(samples)]
    rows = [row for row in rows if allowed(row)]
    numbers: dict[Any, int] = {}
    masks = [sum(1 << numbers.setdefault(pair, len(numbers)) for pair in pairs(row)) for row in rows]
    left, table = (1 << len(numbers)) - 1, []
    while left:
        best = max(range(len(rows)), key=lambda number: (masks[number] & left).bit_count())
        table.append(rows[best])
        left &= ~masks[best]
    return table


def pairs(row: Row) -> list[Any]:
    """All pairs of (feature, value) of a row."""
    return list(itertools.combinations(row.items(), 2))
