import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcb.request import SamplingParams
from jaxcb.sampling import Tier
from jaxcb.scheduler import StepPlan
from jaxcb.step.batch import CHANGES_PER_UPLOAD, SlotState, StepLayout, apply_changes, unpack_sampling
from jaxcb.step.buckets import Bucket, Buckets
from jaxcb.step.controls import ControlLayout
from jaxcb.step.owners import SlotOwners
from tests.step.forward import packed, row_of

SLOTS, P, V = 9, 6, 40


def example() -> StepPlan:
    """The plan of the docstrings: a decodes at position 7, b is given three tokens from position 4 on."""
    a = row_of(
        5, [-1], start=7, pages=[], sampling=SamplingParams(temperature=0.5, top_k=3, min_p=0.125, seed=2**40 + 5)
    )
    b = row_of(2, [11, 12, 13], start=4, pages=[8, 2])
    b.first_new_page = 2
    return StepPlan.of([a, b], 1)


def test_the_worked_example_of_the_docstring():
    layout = StepLayout(Bucket(8, 4, False), P, SLOTS)
    upload, overflow, sampling_slots, *_ = packed(layout, example())
    assert sampling_slots.tolist() == [5, 2]
    assert upload.shape == (layout.size,) and upload.dtype == np.int32 and overflow == []
    batch = jax.tree.map(np.asarray, layout.unpack(jnp.asarray(upload)))
    np.testing.assert_array_equal(batch.token_ids, [-1, 11, 12, 13, 0, 0, 0, 0])
    np.testing.assert_array_equal(batch.positions, [7, 4, 5, 6, 0, 0, 0, 0])
    np.testing.assert_array_equal(batch.token_rows, [0, 1, 1, 1, 3, 3, 3, 3])
    np.testing.assert_array_equal(batch.query_starts, [0, 1, 4, 4, 4])
    np.testing.assert_array_equal(batch.context_lens, [8, 7, 0, 0])
    np.testing.assert_array_equal(batch.slots, [5, 2, SLOTS, SLOTS])
    np.testing.assert_array_equal(batch.change_index[:3], [2 * P + 2, 2 * P + 3, SLOTS * P])
    np.testing.assert_array_equal(batch.change_page[:3], [8, 2, 0])


def test_sampling_parameters_arrive_as_they_were_sent():
    layout = StepLayout(Bucket(8, 4, False), P, SLOTS)
    upload = packed(layout, example()).upload
    slots, part = unpack_sampling(layout.sample_part(jnp.asarray(upload)), 4)
    np.testing.assert_array_equal(slots, [5, 2, SLOTS, SLOTS])
    np.testing.assert_array_equal(part.positions, [8, 7, 0, 0])
    np.testing.assert_array_equal(part.temperature, np.float32([0.5, 0, 0, 0]))
    np.testing.assert_array_equal(part.top_p, np.float32([1, 1, 1, 1]))
    np.testing.assert_array_equal(part.min_p, np.float32([0.125, 0, 0, 0]))
    np.testing.assert_array_equal(part.top_k, [3, 0, 0, 0])
    np.testing.assert_array_equal(part.seeds[0], np.uint32([5, 2**8]))
    assert (np.asarray(part.forbidden) == -1).all()


def test_a_negative_seed_and_a_huge_top_k_fit():
    row = row_of(0, [1], start=0, pages=[], sampling=SamplingParams(top_k=2**40, seed=-1))
    layout = StepLayout(Bucket(1, 1, True), P, SLOTS)
    _, part = unpack_sampling(layout.sample_part(jnp.asarray(packed(layout, StepPlan.of([row], 1)).upload)), 1)
    assert int(part.top_k[0]) == 2**31 - 1
    np.testing.assert_array_equal(part.seeds[0], np.uint32([2**32 - 1, 2**32 - 1]))


def test_a_row_that_samples_nothing_goes_to_the_trash_slot():
    row = row_of(3, [1, 2], start=0, pages=[1])
    row.samples = False
    layout = StepLayout(Bucket(2, 2, False), P, SLOTS)
    slots, _ = unpack_sampling(layout.sample_part(jnp.asarray(packed(layout, StepPlan.of([row], 0)).upload)), 2)
    np.testing.assert_array_equal(slots, [SLOTS, SLOTS])


def test_end_tokens_are_forbidden_until_min_tokens_are_there_and_the_slots_next_owner_knows_nothing_of_it():
    layout, owners = StepLayout(Bucket(1, 1, True), P, SLOTS), SlotOwners(SLOTS + 1)
    sampling = SamplingParams(temperature=0, min_tokens=2)
    forbidden = []
    for start in (0, 1, 2):  # the prompt has one token
        row = row_of(4, [1], start=start, pages=[], sampling=sampling)
        row.sequence.end_ids = frozenset({9, 7})
        owners.enter([row])
        _, part = unpack_sampling(layout.sample_part(jnp.asarray(layout.pack(StepPlan.of([row], 1), owners).upload)), 1)
        forbidden.append([int(i) for i in part.forbidden[0] if i >= 0])
    assert forbidden == [[7, 9], [7, 9], []]
    other = row_of(4, [1], start=0, pages=[])
    owners.enter([other])
    _, part = unpack_sampling(layout.sample_part(jnp.asarray(layout.pack(StepPlan.of([other], 1), owners).upload)), 1)
    assert (np.asarray(part.forbidden) == -1).all()


def test_a_step_takes_the_cheapest_tier_and_the_log_probabilities_that_its_owners_ask_for():
    owners = SlotOwners(SLOTS + 1)
    asks = {
        0: SamplingParams(temperature=0),
        1: SamplingParams(temperature=1),
        2: SamplingParams(temperature=1, top_k=5, logprobs=2),
        3: SamplingParams(temperature=0, logprobs=-1),
    }
    owners.enter(row_of(slot, [1], start=0, pages=[1], sampling=sampling) for slot, sampling in asks.items())
    assert owners.tier_of(np.int32([0])) is Tier.GREEDY and owners.asked_logprobs(np.int32([0, 1])) == []
    assert owners.tier_of(np.int32([0, 1])) is Tier.PLAIN
    assert owners.tier_of(np.int32([2, 0])) is Tier.TRUNCATED and owners.asked_logprobs(np.int32([2])) == [False]
    assert owners.asked_logprobs(np.int32([0, 2, 3])) == [False, True]
    assert owners.tier_of(np.int32([])) is Tier.GREEDY


def test_decodes_in_columns_are_packed_as_rows_are():
    layout = StepLayout(Bucket(8, 4, False), P, SLOTS)
    rows = [row_of(slot, [-1], start=start, pages=[]) for slot, start in ((3, 6), (1, 9))]
    chunk = row_of(7, [21, 22], start=0, pages=[4])
    columns = StepPlan(0, [row.sequence for row in rows], [3, 1], [6, 9], {}, [chunk], 4)
    expected = packed(layout, StepPlan.of([*rows, chunk], 2))
    for ours, theirs in zip(packed(layout, columns), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_step_of_plain_decodes_is_packed_as_rows_are():
    """It takes a shorter way."""
    layout = StepLayout(Bucket(4, 4, True), P, SLOTS)
    cold, hot = SamplingParams(temperature=0), SamplingParams(temperature=0.5, seed=7, min_tokens=12)
    rows = [row_of(3, [-1], start=6, pages=[], sampling=cold), row_of(1, [-1], start=9, pages=[], sampling=hot)]
    columns = StepPlan(0, [row.sequence for row in rows], [3, 1], [6, 9], {}, [], 2)
    owners = SlotOwners(SLOTS + 1)
    owners.enter(rows)
    for ours, theirs in zip(layout.pack(columns, owners), layout.pack(StepPlan.of(rows, 2), owners), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_more_table_changes_than_an_upload_holds_are_handed_back():
    layout = StepLayout(Bucket(1, 1, True), 1000, SLOTS)
    pages = list(range(1, 31))
    upload, overflow, *_ = packed(layout, StepPlan.of([row_of(2, [1], start=479, pages=pages)], 1))
    kept = layout.num_changes
    assert kept < 30 and kept <= CHANGES_PER_UPLOAD
    assert overflow == [(2 * 1000 + i, pages[i]) for i in range(kept, 30)]
    np.testing.assert_array_equal(layout.unpack(jnp.asarray(upload)).change_page, pages[:kept])


def test_changes_reach_only_their_slot():
    state = SlotState.at_rest(3, 4, ControlLayout(V, 8))
    state = apply_changes(state, jnp.int32([1 * 4 + 2, 3 * 4]), jnp.int32([7, 0]))
    np.testing.assert_array_equal(state.block_tables, [[0, 0, 0, 0], [0, 0, 7, 0], [0, 0, 0, 0], [0, 0, 0, 0]])


def test_buckets_end_at_the_limits_and_the_smallest_that_fits_is_chosen():
    buckets = Buckets(6, 100, decode_sizes=(1, 2, 4, 8), mixed_sizes=(32, 64, 128))
    assert [str(bucket) for bucket in buckets] == [
        "decode 1", "decode 2", "decode 4", "decode 6", "mixed 32", "mixed 64", "mixed 100",
    ]  # fmt: skip
    assert buckets.choose(3, True) == Bucket(4, 4, True)
    assert buckets.choose(5, True) == Bucket(6, 6, True)
    assert buckets.choose(33, False) == Bucket(64, 6, False)
    assert buckets.choose(100, False) == Bucket(100, 6, False)
    with pytest.raises(IndexError):
        buckets.choose(101, False)
