"""Packer: the uploads of an engine's steps, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jaxcb.scheduler import StepPlan
from jaxcb.scheduler.plan import PlanRow
from jaxcb.step.batch import Packed, StepLayout, goes_on
from jaxcb.step.buckets import Bucket
from jaxcb.step.orders import SampleOrder
from jaxcb.step.owners import SlotOwners


class _Last(NamedTuple):
    slots: Seq[int]
    starts: Seq[int]
    packed: Packed
    tokens: SampleOrder
    one_further: Int[np.ndarray, "size"]

    def is_followed_by(self, plan: StepPlan) -> bool:
        """Whether a step that goes on has the same rows, each a token further."""
        return self.slots == plan.slots and [start + 1 for start in self.starts] == plan.starts


class Packer:
    """Most steps take the rows of the step before one token further: their uploads are made of that one's, in a third
    of the time. ``layouts``: of every bucket."""

    def __init__(self, layouts: Mapping[Bucket, StepLayout], owners: SlotOwners):
        self._layouts, self._owners = layouts, owners
        self._last: _Last | None = None
        """The step before, if it was one that goes on."""

    def pack(self, plan: StepPlan, bucket: Bucket, newcomers: Seq[PlanRow]) -> tuple[Packed, SampleOrder]:
        """The upload, and what asks for its rows' tokens. ``newcomers``: rows that enter their slots with it."""
        layout, last = self._layouts[bucket], self._last
        self._owners.enter(newcomers)
        if not goes_on(plan):
            self._last = None
            return self._whole(plan, layout)
        if last is not None and last.packed.tokens_until_free > 1 and last.is_followed_by(plan):
            packed, tokens = layout.pack_next(last.packed, plan, last.one_further), last.tokens
            self._last = _Last(plan.slots, plan.starts, packed, tokens, last.one_further)
            return packed, tokens
        packed, tokens = self._whole(plan, layout)
        self._last = _Last(plan.slots, plan.starts, packed, tokens, layout.one_further(plan.num_rows))
        return packed, tokens

    def _whole(self, plan: StepPlan, layout: StepLayout) -> tuple[Packed, SampleOrder]:
        packed = layout.pack(plan, self._owners)
        slots = packed.sampling_slots
        tier, logprobs = self._owners.tier_of(slots), self._owners.asked_logprobs(slots)
        return packed, SampleOrder(layout.bucket, tier, plan.num_rows, logprobs)
