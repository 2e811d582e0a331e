"""Expected sequences: room for their KV, their first token, and every way out, against a scheduler without a device."""

from __future__ import annotations

import dataclasses
import io

import pytest

from jaxcb.request import FinishReason, Request, SamplingParams
from jaxcb.scheduler import Scheduler, SchedulerLimits, Sequence
from jaxcb.scheduler.handover import has_room
from jaxcb.scheduler.replay import RecordingScheduler, replay

EOS = 9


def make(**changes: object) -> Scheduler:
    return Scheduler(limits(**changes), [EOS])


def limits(**changes: object) -> SchedulerLimits:
    values = {
        "max_num_seqs": 2,
        "num_slots": 4,
        "max_num_batched_tokens": 8,
        "max_model_len": 40,
        "num_kv_pages": 20,
        "page_size": 4,
        "admission_watermark": 0.0,
    } | changes
    return SchedulerLimits(**values)


def request(name: str, num_tokens: int = 10, **sampling: object) -> Request:
    values = {"max_tokens": 6, **sampling}
    return Request(request_id=name, prompt_token_ids=[1] * num_tokens, sampling=SamplingParams(**values))


def run(scheduler: Scheduler, token: int = 5) -> list[tuple[str, int]]:
    """Steps until nothing is left; (request, token) of what came."""
    tokens = []
    for _ in range(200):
        plan = scheduler.plan()
        if plan is None:
            return tokens
        for event in scheduler.commit(plan, [token] * plan.num_rows):
            tokens.append((event.sequence.request.request_id, event.token_id))
        scheduler.check()
    raise AssertionError("it never ends")


def expect(scheduler: Scheduler, name: str, **fields: object) -> Sequence:
    [sequence] = scheduler.handover.expect([request(name, **fields)])
    return sequence


def test_an_adopted_sequence_runs_from_its_first_token_on_in_the_pages_that_were_reserved():
    scheduler = make()
    sequence = expect(scheduler, "a")
    assert not scheduler.has_requests and scheduler.num_waiting == 1 and scheduler.plan() is None
    assert scheduler.handover.reserve(sequence) == 0
    assert scheduler.pool.num_used == 3 and scheduler.handover.waits_for_others
    pages = list(sequence.pages)
    scheduler.check()
    event = scheduler.handover.first_token(sequence, 7, num_cached_tokens=4)
    assert (event.token_id, event.finish_reason) == (7, None)
    scheduler.handover.adopt(sequence)
    plan = scheduler.plan()
    [row] = plan.rows
    assert (row.token_ids, row.start, row.samples, row.new_pages) == ([7], 10, True, pages)
    scheduler.commit(plan, [5])
    assert [token for _, token in run(scheduler)] == [5] * 4
    assert sequence.token_ids[10:] == [7, 5, 5, 5, 5, 5] and sequence.num_cached_tokens == 4
    assert scheduler.pool.num_used == 0 and not scheduler.handover.waits_for_others


@pytest.mark.parametrize(
    ("token", "sampling", "reason"),
    [(EOS, {}, FinishReason.STOP), (7, {"max_tokens": 1}, FinishReason.LENGTH), (EOS, {"ignore_eos": True}, None)],
)
def test_the_first_token_may_be_the_last(token, sampling, reason):
    scheduler = make()
    [sequence] = scheduler.handover.expect([request("a", **sampling)])
    scheduler.handover.reserve(sequence)
    assert scheduler.handover.first_token(sequence, token, 0).finish_reason is reason
    assert (scheduler.pool.num_used == 0) == (reason is not None)
    scheduler.check()


def test_seats_and_pages_that_are_reserved_are_nobody_elses():
    scheduler = make()
    first, second = expect(scheduler, "a"), expect(scheduler, "b")
    assert scheduler.handover.reserve(first) is not None and scheduler.handover.reserve(second) is not None
    third = expect(scheduler, "c")
    assert scheduler.handover.reserve(third) is None, "two seats"
    scheduler.add(request("d"))
    assert scheduler.plan() is None
    scheduler.finish("a", FinishReason.ABORT)
    assert scheduler.handover.reserve(third) is not None
    assert scheduler.plan() is None, "the seat is taken again"
    for name in "bc":
        scheduler.finish(name, FinishReason.ABORT)
    assert len(run(scheduler)) == 6


def test_there_is_room_when_pages_beside_the_growth_of_others_are_left():
    tight = limits(num_kv_pages=20, admission_watermark=0.2)
    assert has_room(tight, num_open=0, num_free_pages=10, num_pages=10)
    assert has_room(tight, num_open=1, num_free_pages=10, num_pages=6)
    assert not has_room(tight, num_open=1, num_free_pages=10, num_pages=7)
    assert not has_room(tight, num_open=2, num_free_pages=20, num_pages=1)


def test_a_guaranteed_reservation_counts_what_all_others_may_still_take():
    scheduler = make(reservation="guaranteed", num_kv_pages=11)
    first, second = expect(scheduler, "a", max_tokens=14), expect(scheduler, "b", max_tokens=14)
    assert scheduler.handover.reserve(first) is not None
    assert scheduler.handover.reserve(second) is None, "3 + 3 pages are free, 6 + 6 may be needed"


def test_a_guaranteed_admission_counts_what_those_with_reserved_pages_may_still_take():
    scheduler = make(reservation="guaranteed", num_kv_pages=9, max_model_len=36)
    sequence = expect(scheduler, "a", max_tokens=14)
    assert scheduler.handover.reserve(sequence) == 0
    scheduler.add(request("b", max_tokens=14))
    assert scheduler.plan() is None, "3 + 3 pages are free, 6 + 6 may be needed"
    scheduler.handover.first_token(sequence, 7, 0)
    scheduler.handover.adopt(sequence)
    tokens = run(scheduler)
    assert scheduler.counters.preemptions == 0
    assert sorted(name for name, _ in tokens) == ["a"] * 13 + ["b"] * 14


def test_what_is_taken_over_is_computed_here_with_the_token_that_is_known():
    scheduler = make()
    sequence = expect(scheduler, "a")
    scheduler.handover.reserve(sequence)
    scheduler.handover.first_token(sequence, 7, 0)
    scheduler.handover.take_over(sequence)
    assert scheduler.pool.num_used == 0
    assert [token for _, token in run(scheduler)] == [5] * 5
    assert sequence.token_ids[10:] == [7, 5, 5, 5, 5, 5]


@pytest.mark.parametrize("end", ["adopt", "take_over", "abort"])
def test_the_other_answers_to_a_prompt_fork_from_the_first(end):
    scheduler = make(max_num_seqs=3, num_slots=6)
    requests = [request(f"a{i}") for i in range(3)]
    first, *others = scheduler.handover.expect(requests)
    scheduler.handover.reserve(first)
    scheduler.finish("a2", FinishReason.ABORT)
    if end == "abort":
        scheduler.finish("a0", FinishReason.ABORT)
    else:
        scheduler.handover.first_token(first, 7, 0)
        getattr(scheduler.handover, end)(first)
    tokens = run(scheduler)
    assert [name for name, _ in tokens].count("a1") == 6 and others[0].num_cached_tokens == (end != "abort") * 9
    assert scheduler.pool.num_used == 0


def test_a_preempted_adopted_sequence_computes_its_tokens_again():
    scheduler = make(num_kv_pages=9, max_model_len=36)
    for name in "ab":
        sequence = expect(scheduler, name, max_tokens=20)
        scheduler.handover.reserve(sequence)
        scheduler.handover.first_token(sequence, 7, 0)
        scheduler.handover.adopt(sequence)
    tokens = run(scheduler)
    assert scheduler.counters.preemptions > 0
    assert sorted(name for name, _ in tokens) == ["a"] * 19 + ["b"] * 19


def test_lent_pages_outlive_their_sequence():
    scheduler = make()
    sequence = scheduler.add(request("a", max_tokens=1))
    plan = scheduler.plan()
    scheduler.handover.lend("a", sequence.pages[:2])
    scheduler.commit(plan, [0])
    run(scheduler)
    assert scheduler.pool.num_used == 2
    scheduler.check()
    scheduler.handover.returned("a")
    scheduler.handover.returned("a")
    assert scheduler.pool.num_used == 0


def test_a_recorded_life_with_hand_overs_is_replayed():
    log = io.StringIO()
    scheduler = RecordingScheduler(limits(), [EOS], file=log)
    for name, end in (("a", "adopt"), ("b", "take_over"), ("c", None)):
        sequence = expect(scheduler, name)
        scheduler.handover.reserve(sequence)
        scheduler.handover.first_token(sequence, 7, 0)
        if end is None:
            scheduler.finish(name, FinishReason.ABORT)
        else:
            getattr(scheduler.handover, end)(sequence)
    scheduler.handover.lend("a", sequence.pages)
    plan = scheduler.plan()
    scheduler.handover.returned("a")
    scheduler.commit(plan, [5] * plan.num_rows)
    run(scheduler)
    assert len(replay(log.getvalue().splitlines())) > 5


def test_moves_that_are_carried_out_between_plans_are_in_the_log():
    """Pages of others that move to host memory before KV comes into them."""
    log = io.StringIO()
    scheduler = RecordingScheduler(limits(num_kv_pages=11, num_host_pages=4), [EOS], file=log)
    scheduler.add(request("old"))
    run(scheduler)
    [sequence] = scheduler.handover.expect([dataclasses.replace(request("a"), prompt_token_ids=[2] * 34)])
    assert scheduler.handover.reserve(sequence) == 0
    assert scheduler.take_moves().out
    scheduler.handover.first_token(sequence, 7, 0)
    scheduler.handover.adopt(sequence)
    run(scheduler)
    assert len(replay(log.getvalue().splitlines())) > 5


def test_what_is_foreseen_of_an_expected_sequence_is_in_the_log():
    log = io.StringIO()
    scheduler = RecordingScheduler(limits(), [EOS], file=log)
    sequence = expect(scheduler, "a")
    scheduler.foresee(sequence, [7, 5, 5])
    scheduler.handover.reserve(sequence)
    scheduler.handover.first_token(sequence, 7, 0)
    scheduler.foresee(sequence, [5, 5])
    scheduler.handover.adopt(sequence)
    run(scheduler)
    lines = log.getvalue().splitlines()
    assert sum('"foresee"' in line for line in lines) == 2
    assert len(replay(lines)) == 3, "of five tokens some are computed together"
