"""SlotOwners: what the host knows of each slot's owner, in columns: packing a step takes no loop over its rows."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxcb.sampling import Tier
from jaxcb.sampling_params import SamplingParams
from jaxcb.scheduler import PlanRow, Sequence

DRAW_COLUMNS = 6
"""[temperature, top_p, min_p, top_k, seed low, seed high], floats as their bits."""
_MAX_INT32 = 2**31 - 1
_NEVER = _MAX_INT32


class SlotOwners:
    """Told of the rows that enter (:meth:`enter`); of a slot that nobody has entered it knows a greedy owner."""

    def __init__(self, num_slots: int):
        self.draws = np.tile(_draw(SamplingParams(temperature=0.0)), (num_slots, 1))
        self.tiers = np.zeros(num_slots, np.int8)
        self.asks_top = np.zeros(num_slots, bool)
        """For the log-probabilities of its likeliest ids."""
        self.asks_all = np.zeros(num_slots, bool)
        self._free_after = np.zeros(num_slots, np.int32)
        """The context length from which on its end tokens may be sampled."""
        self.end_ids: dict[int, list[int]] = {}
        """By slot, of owners that are to have ``min_tokens``."""

    def enter(self, rows: Iterable[PlanRow]) -> None:
        """Their sequences own their slots from now on."""
        for row in rows:
            slot, sequence = row.slot, row.sequence
            sampling = sequence.request.sampling
            self.draws[slot] = _draw(sampling)
            self.tiers[slot] = sampling.tier
            self.asks_top[slot] = sampling.logprobs is not None and sampling.logprobs >= 0
            self.asks_all[slot] = sampling.logprobs is not None and sampling.logprobs < 0
            self._free_after[slot] = _free_after(sequence)
            self.end_ids.pop(slot, None)
            if sampling.min_tokens:
                self.end_ids[slot] = sorted(sequence.end_ids)

    def held_back(self, slots: np.ndarray, context_lens: np.ndarray) -> tuple[list[int], int]:
        """Indices of the rows that may not sample their ``end_ids`` yet, for lack of ``min_tokens``, and after how many
        more tokens of every row the first of them may."""
        if not self.end_ids:
            return [], _NEVER
        missing = self._free_after[slots] - context_lens
        held = np.flatnonzero(missing > 0).tolist()
        return held, int(missing[held].min(initial=_NEVER))

    def tier_of(self, slots: np.ndarray) -> Tier:
        """The cheapest tier that honours every owner."""
        return Tier(int(self.tiers[slots].max(initial=0)))

    def asked_logprobs(self, slots: np.ndarray) -> list[bool]:
        """Which log-probabilities the owners want: False the likeliest ids', True all."""
        return [every for every, asks in ((False, self.asks_top), (True, self.asks_all)) if asks[slots].any()]


def _free_after(sequence: Sequence) -> int:
    min_tokens = sequence.request.sampling.min_tokens
    return sequence.num_prompt_tokens + min_tokens if min_tokens else 0


def _draw(sampling: SamplingParams) -> np.ndarray:
    """int32 [DRAW_COLUMNS]; for the greedy it says nothing."""
    row = np.zeros(DRAW_COLUMNS, np.int32)
    if sampling.greedy:
        row[:3].view(np.float32)[1] = 1.0
        return row
    row[:3].view(np.float32)[:] = sampling.temperature, sampling.top_p, sampling.min_p
    seed = (sampling.seed or 0) & (2**64 - 1)
    words = [min(max(sampling.top_k, 0), _MAX_INT32), seed & 0xFFFFFFFF, seed >> 32]
    row[3:] = np.array(words, np.uint32).view(np.int32)
    return row
