"""Log-probabilities of tokens, as arrays: what a request that asks for them is given."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int


@dataclasses.dataclass(frozen=True, eq=False)
class Logprobs:
    """Natural logarithms of the probabilities of n tokens in a row, and at each of the k likeliest alternatives."""

    token_ids: Int[np.ndarray, "n"]
    logprobs: Float[np.ndarray, "n"]
    ranks: Int[np.ndarray, "n"]
    """1 is the likeliest token of the vocabulary."""
    top_ids: Int[np.ndarray, "n k"]
    """The likeliest first. Where all were asked for: every id, in order of the ids."""
    top_logprobs: Float[np.ndarray, "n k"]

    def __len__(self) -> int:
        return len(self.token_ids)

    @staticmethod
    def none(k: int = 0) -> Logprobs:
        """Of no tokens."""
        ids, values = np.zeros(0, np.int32), np.zeros(0, np.float32)
        return Logprobs(ids, values, ids, ids.reshape(0, k), values.reshape(0, k))

    @staticmethod
    def concatenate(parts: Sequence[Logprobs]) -> Logprobs:
        """Of the tokens of all parts; the parts have the same k."""
        if not parts:
            return Logprobs.none()
        fields = [field.name for field in dataclasses.fields(Logprobs)]
        return Logprobs(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in fields})

    def take(self, index: int | slice) -> Logprobs:
        """Of one token, or of a range of them."""
        part = slice(index, index + 1) if isinstance(index, int) else index
        fields = [field.name for field in dataclasses.fields(Logprobs)]
        return Logprobs(**{name: getattr(self, name)[part] for name in fields})

    def limited(self, k: int) -> Logprobs:
        """With the k likeliest alternatives alone."""
        return dataclasses.replace(self, top_ids=self.top_ids[:, :k], top_logprobs=self.top_logprobs[:, :k])
