"""What a packer makes of the step before is what packing the step by itself gives."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcb.request import SamplingParams
from jaxcb.scheduler import StepPlan
from jaxcb.scheduler.plan import IN_FLIGHT, PlanRow
from jaxcb.step import packer as packer_module
from jaxcb.step.batch import StepLayout
from jaxcb.step.buckets import Bucket
from jaxcb.step.orders import SampleOrder
from jaxcb.step.owners import SlotOwners
from jaxcb.step.packer import Packer
from tests.step.forward import row_of

SLOTS, P, PAGE = 6, 8, 2
LAYOUTS = {
    bucket: StepLayout(bucket, P, SLOTS) for bucket in (Bucket(2, 2, True), Bucket(4, 4, True), Bucket(8, 4, False))
}
SAMPLING = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.5, top_k=3, seed=7, logprobs=1),
    SamplingParams(temperature=0, min_tokens=6),
]


class Host:
    """Sequences that enter with a prompt of three tokens, decode, and leave."""

    def __init__(self) -> None:
        self.running: dict[int, PlanRow] = {}
        self.next_page = 1

    def step(self, enters: int | None, sampling: SamplingParams, leaves: int | None) -> tuple[StepPlan, list[PlanRow]]:
        if leaves is not None:
            self.running.pop(leaves, None)
        decodes = []
        for slot, row in self.running.items():
            start = row.start + len(row.token_ids)
            pages = [self.new_page()] if start % PAGE == 0 else []
            decodes.append(PlanRow(row.sequence, slot, (IN_FLIGHT,), start, True, start // PAGE if pages else 0, pages))
        newcomers = []
        if enters is not None and enters not in self.running and len(decodes) < 4:
            row = row_of(enters, [11, 12, 13], start=0, pages=[self.new_page(), self.new_page()], sampling=sampling)
            row.sequence.end_ids = frozenset({9, enters})
            newcomers = [row]
        self.running = {row.slot: row for row in (*decodes, *newcomers)}
        others = {index: row for index, row in enumerate(decodes) if row.new_pages}
        starts, slots = [row.start for row in decodes], [row.slot for row in decodes]
        tokens = len(decodes) + 3 * len(newcomers)
        return StepPlan(0, [row.sequence for row in decodes], slots, starts, others, newcomers, tokens), newcomers

    def new_page(self) -> int:
        self.next_page += 1
        return self.next_page


def bucket_of(plan: StepPlan) -> Bucket:
    fits = [
        bucket for bucket in LAYOUTS if bucket.num_tokens >= plan.num_tokens and bucket.decode_only <= plan.decode_only
    ]
    return min(fits, key=lambda bucket: bucket.num_tokens)


seldom_a_slot = st.sampled_from([*[None] * 9, *range(SLOTS)])


@settings(deadline=None)
@given(st.lists(st.tuples(seldom_a_slot, st.sampled_from(SAMPLING), seldom_a_slot), min_size=10, max_size=40))
def test_any_run_of_steps_is_packed_as_each_would_be_by_itself(
    steps: list[tuple[int | None, SamplingParams, int | None]],
) -> None:
    host, packer, owners = Host(), Packer(LAYOUTS, SlotOwners(SLOTS + 1)), SlotOwners(SLOTS + 1)
    for enters, sampling, leaves in steps:
        plan, newcomers = host.step(enters, sampling, leaves)
        if not plan.num_tokens:
            continue
        bucket = bucket_of(plan)
        packed, order = packer.pack(plan, bucket, newcomers)
        owners.enter(newcomers)
        expected = LAYOUTS[bucket].pack(plan, owners)
        np.testing.assert_array_equal(packed.upload, expected.upload)
        np.testing.assert_array_equal(packed.sampling_slots, expected.sampling_slots)
        assert (packed.overflow, packed.num_changes) == (expected.overflow, expected.num_changes)
        slots = expected.sampling_slots
        wanted = (bucket, owners.tier_of(slots), plan.num_rows, owners.asked_logprobs(slots))
        assert order == SampleOrder(*wanted)


def test_a_step_that_goes_on_is_made_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    host, packer = Host(), Packer(LAYOUTS, SlotOwners(SLOTS + 1))
    whole: list[StepPlan] = []
    monkeypatch.setattr(
        packer_module.StepLayout,
        "pack",
        lambda self, plan, owners, pack=StepLayout.pack: whole.append(plan) or pack(self, plan, owners),
    )
    for enters in (0, 1, None, None, None, None, None):
        plan, newcomers = host.step(enters, SAMPLING[0], None)
        packer.pack(plan, bucket_of(plan), newcomers)
    assert len(whole) == 3  # two that bring a prompt, and the first without one, though pages come later too


def test_a_step_that_is_launched_again_is_packed_as_it_is() -> None:
    host, packer = Host(), Packer(LAYOUTS, SlotOwners(SLOTS + 1))
    host.step(2, SAMPLING[0], None)
    plan, _ = host.step(None, SAMPLING[0], None)
    first, again = (packer.pack(plan, bucket_of(plan), [])[0].upload for _ in range(2))
    np.testing.assert_array_equal(first, again)
