"""Reads the GGUF container: metadata, and tensors dequantised one at a time.

The header is parsed here, in bounds-checked steps: the ``gguf`` package's reader takes seconds for a vocabulary of
50,000 tokens. That package's tables of block formats and its dequantisation are used as they are.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

from jaxcb.errors import ModelError

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""GGUF's value types as numpy dtypes."""
_MAX_DIMS = 4


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies and how it is stored. ``shape`` is in numpy's order (GGUF writes the fastest axis first)."""

    shape: tuple[int, ...]
    type_id: int
    start: int
    num_bytes: int


class GGUFFile:
    """An open GGUF file.

    Raises:
        ModelError: the file is no GGUF, is truncated, or names sizes that don't fit into it.
    """

    def __init__(self, path: Path):
        self.path = path
        self._position = 0
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self.metadata, self.tensors = self._parse()
        except (OSError, ValueError, struct.error) as error:
            raise ModelError(f"{path} is not a readable GGUF file: {error}") from error

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value: int, float, bool, str, a list of str or a numpy array."""
        return self.metadata.get(key, default)

    def type_name(self, name: str) -> str:
        """Name of the tensor's format, such as "Q4_1" or "BF16"."""
        import gguf

        return gguf.GGMLQuantizationType(self.tensors[name].type_id).name

    def read(self, name: str) -> np.ndarray:
        """The tensor as a new array: float16 and bfloat16 as they are, everything else as float32."""
        import gguf
        import ml_dtypes

        info = self.tensors[name]
        kind = gguf.GGMLQuantizationType(info.type_id)
        raw = np.frombuffer(self._data, np.uint8, info.num_bytes, info.start)
        if kind in (gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16):
            dtype = np.float16 if kind == gguf.GGMLQuantizationType.F16 else ml_dtypes.bfloat16
            return raw.view(dtype).reshape(info.shape).copy()
        rows = raw.reshape(math.prod(info.shape[:-1]), -1)
        try:
            return gguf.dequantize(rows, kind).astype(np.float32, copy=False).reshape(info.shape)
        except NotImplementedError as error:
            raise ModelError(f"{self.path}: tensor {name} is stored as {kind.name}, which can't be read") from error

    def _parse(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if self._data[:4] != b"GGUF":
            raise ValueError(f"it begins with {bytes(self._data[:4])!r}, not b'GGUF'")
        self._position = 4
        version = self._number("<I")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not supported; supported: 2, 3")
        num_tensors, num_values = self._number("<Q"), self._number("<Q")
        metadata = {}
        for _ in range(num_values):  # a false count, here or below, ends with an error at the end of the file
            key = self._string()
            metadata[key] = self._value(self._number("<I"))
        headers = [self._tensor_header() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}")
        data_start = -(-self._position // alignment) * alignment
        tensors = {
            name: self._locate(name, shape, type_id, data_start + offset) for name, shape, type_id, offset in headers
        }
        return metadata, tensors

    def _locate(self, name: str, shape: tuple[int, ...], type_id: int, start: int) -> TensorInfo:
        import gguf

        kind = gguf.GGMLQuantizationType(type_id)  # ValueError: an unknown type
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if not shape or min(shape) < 1 or shape[-1] % block_size:
            raise ValueError(f"tensor {name} of type {kind.name} has the shape {shape}")
        info = TensorInfo(shape, type_id, start, math.prod(shape) // block_size * block_bytes)
        if info.start + info.num_bytes > len(self._data):
            raise ValueError(f"tensor {name} ends at byte {info.start + info.num_bytes}, the file at {len(self._data)}")
        return info

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self._data, self._position)
        self._position += struct.calcsize(code)
        return value

    def _bytes(self, count: int) -> bytes:
        if count > len(self._data) - self._position:
            raise ValueError(f"a value of {count} bytes at byte {self._position} reaches past the end of the file")
        self._position += count
        return self._data[self._position - count : self._position]

    def _string(self) -> str:
        return self._bytes(self._number("<Q")).decode("utf-8", errors="replace")

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind])
            return np.frombuffer(self._bytes(dtype.itemsize), dtype)[0].item()
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ValueError(f"unknown value type {kind} at byte {self._position}")
        item_kind, count = self._number("<I"), self._number("<Q")
        if item_kind == _STRING:
            return [self._string() for _ in range(count)]
        if item_kind not in _SCALARS:
            raise ValueError(f"unknown array type {item_kind} at byte {self._position}")
        dtype = np.dtype(_SCALARS[item_kind])
        return np.frombuffer(self._bytes(count * dtype.itemsize), dtype)

    def _tensor_header(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dims = self._number("<I")
        if num_dims > _MAX_DIMS:
            raise ValueError(f"tensor {name} has {num_dims} dimensions")
        shape = tuple(self._number("<Q") for _ in range(num_dims))[::-1]
        return name, shape, self._number("<I"), self._number("<Q")
