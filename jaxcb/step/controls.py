"""The controls of a slot on their way to the device: one int32 row, uploaded when a sequence that needs it enters."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array, Int

from jaxcb.devices import on_device
from jaxcb.request import Request
from jaxcb.sampling import Controls
from jaxcb.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_DRY_BREAKERS, MAX_LOGIT_BIAS, SamplingParams

_SCALARS = {
    "num_prompt": np.int32,
    "repetition_penalty": np.float32,
    "presence_penalty": np.float32,
    "frequency_penalty": np.float32,
    "no_repeat_ngram_size": np.int32,
    "dry_multiplier": np.float32,
    "dry_base": np.float32,
    "dry_allowed_length": np.int32,
    "typical_p": np.float32,
    "top_n_sigma": np.float32,
    "xtc_probability": np.float32,
    "xtc_threshold": np.float32,
}
AT_REST = SamplingParams()


@dataclasses.dataclass(frozen=True)
class ControlLayout:
    """Shapes of a slot's controls. All of a slot takes 4 (max_model_len + vocab_size / 32 + 2,600) bytes."""

    vocab_size: int
    max_model_len: int

    @functools.cached_property
    def fields(self) -> Mapping[str, tuple[tuple[int, ...], Any]]:
        """(shape, dtype) of each field of :class:`Controls` for one slot, in its order."""
        arrays: dict[str, tuple[tuple[int, ...], Any]] = {
            "history": ((self.max_model_len,), np.int32),
            "dry_breakers": ((MAX_DRY_BREAKERS,), np.int32),
            "allowed": ((-(-self.vocab_size // 32),), np.uint32),
            "bias_ids": ((MAX_LOGIT_BIAS,), np.int32),
            "bias": ((MAX_LOGIT_BIAS,), np.float32),
            "bad_words": ((2 * MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), np.int32),
        } | {name: ((), dtype) for name, dtype in _SCALARS.items()}
        return {name: arrays[name] for name in Controls._fields}

    @property
    def size(self) -> int:
        """int32 values of a row."""
        return sum(math.prod(shape) for shape, _ in self.fields.values())

    def at_rest(self, num_slots: int, sharding: Sharding | None = None) -> Controls:
        """Every slot asks for nothing. (Zeros would: no id is allowed, and penalties divide by zero.)"""
        row = self.unpack(self.pack(None))
        return jax.tree.map(
            lambda values: on_device(np.broadcast_to(values, (num_slots, *values.shape)), sharding), row
        )

    def pack(self, request: Request | None, token_ids: Sequence[int] = ()) -> np.ndarray:
        """The row of a request that enters with ``token_ids`` known (its prompt, and its answer so far after a
        preemption), or of one that asks for nothing."""
        sampling = AT_REST if request is None else request.sampling
        values: dict[str, np.ndarray] = {
            name: np.full(shape, -1, dtype)
            for name, (shape, dtype) in self.fields.items()
            if dtype is np.int32 and shape
        }
        for name in _SCALARS:
            values[name] = np.asarray(getattr(sampling, name, 0), _SCALARS[name])
        values["bias"] = np.zeros(MAX_LOGIT_BIAS, np.float32)
        values["allowed"] = self._bits(sampling.allowed_token_ids)
        if request is not None:
            values["num_prompt"] = np.asarray(len(request.prompt_token_ids), np.int32)
            values["history"][: len(token_ids)] = token_ids
            values["dry_breakers"][: len(request.dry_breaker_ids)] = request.dry_breaker_ids
            biases = sampling.logit_bias or {}
            values["bias_ids"][: len(biases)] = list(biases.keys())
            values["bias"][: len(biases)] = list(biases.values())
            for row, word in zip(values["bad_words"], request.bad_word_ids, strict=False):
                row[-len(word) :] = word
        return np.concatenate([values[name].reshape(-1).view(np.int32) for name in self.fields])

    def unpack(self, row: Int[Array | np.ndarray, "size"]) -> Controls:
        """One slot's controls, without a leading axis."""
        values, start = {}, 0
        for name, (shape, dtype) in self.fields.items():
            part = row[start : start + math.prod(shape)].reshape(shape)
            values[name] = part.view(dtype)
            start += math.prod(shape)
        return Controls(**values)

    def _bits(self, allowed: Sequence[int] | None) -> np.ndarray:
        num_words = -(-self.vocab_size // 32)
        if allowed is None:
            return np.full(num_words, 2**32 - 1, np.uint32)
        bits = np.zeros(num_words * 32, np.uint8)
        bits[list(allowed)] = 1
        return np.packbits(bits, bitorder="little").view("<u4")


def rows_of(controls: Controls, slots: Int[Array, "S"]) -> Controls:
    return jax.tree.map(lambda values: values[slots], controls)
