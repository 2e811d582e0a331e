"""Writes Hugging Face model directories: JSON files, and safetensors one tensor at a time."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

DTYPE_CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""numpy's dtype names to those of safetensors."""
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_safetensors(
    path: Path, layout: Mapping[str, tuple[str, tuple[int, ...]]], arrays: Iterable[np.ndarray]
) -> None:
    """Write a safetensors file without holding more than one tensor (the library's writer wants all at once).

    The format: 8 bytes with the length of a JSON header, the header, then the bytes of all tensors end to end.

    Arguments:
        layout: names to (code from :data:`DTYPE_CODES`, shape), in the order of ``arrays``.
        arrays: the tensors themselves, made one after the other.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (code, shape) in layout.items():
        start, end = end, end + math.prod(shape) * _ITEM_BYTES[code]
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)))
        file.write(encoded)
        for (name, (code, shape)), array in zip(layout.items(), arrays, strict=True):
            if DTYPE_CODES[array.dtype.name] != code or array.shape != shape:
                raise ValueError(f"{name}: expected {code} {shape}, got {array.dtype.name} {array.shape}")
            file.write(np.ascontiguousarray(array).view(np.uint8).data)
