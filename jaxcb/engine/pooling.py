"""Pool: a prompt's embedding as its chunks come in."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from jaxcb.scheduler.sequence import Sequence
from jaxcb.step.sampled import PooledPiece


class Pool:
    """Of one prompt. A chunk that begins at 0 begins it anew: its sequence was preempted."""

    def __init__(self) -> None:
        self._sums: list[Float[np.ndarray, "E"]] = []
        self._num_tokens = 0
        self._last: Float[np.ndarray, "E"] | None = None

    def add(self, piece: PooledPiece) -> None:
        """Take what the next chunk adds."""
        if piece.sequence.request.pooling == "mean":
            if piece.first == 0:
                self._sums, self._num_tokens = [], 0
            self._sums.append(piece.sum())
            self._num_tokens += piece.num_tokens
        self._last = piece.last()

    def embedding(self, sequence: Sequence) -> Float[np.ndarray, "E"]:
        """float32; the whole prompt has been seen."""
        if sequence.request.pooling == "last":
            assert self._last is not None
            return self._last
        assert self._num_tokens == sequence.num_prompt_tokens
        return np.asarray(np.sum(self._sums, axis=0, dtype=np.float64) / self._num_tokens, np.float32)
