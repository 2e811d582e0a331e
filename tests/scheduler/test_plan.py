from jaxcb.request import FinishReason, Request, SamplingParams
from jaxcb.scheduler import DecodeRow, PlanRow, Scheduler, StepPlan, TokenEvent
from jaxcb.scheduler.plan import IN_FLIGHT
from tests.scheduler.fake_device import limits


def decoding(scheduler: Scheduler, *lengths: int, max_tokens: int = 20) -> None:
    """Requests with prompts of these lengths, all of them computed; the second one's answer may be longer by 10."""
    for number, length in enumerate(lengths):
        sampling = SamplingParams(max_tokens=max_tokens + 10 * number, ignore_eos=True)
        scheduler.add(Request(request_id="abc"[number], prompt_token_ids=[number] * length, sampling=sampling))
    scheduler.commit(plan := scheduler.plan(), [9] * plan.num_rows)


def test_rows_are_the_decodes_then_the_chunks():
    scheduler = Scheduler(limits())
    decoding(scheduler, 7, 5)
    scheduler.commit(scheduler.plan(), [9, 9])
    scheduler.add(Request(request_id="c", prompt_token_ids=[5, 6, 7]))
    plan = scheduler.plan()
    a, b, c = plan.rows
    assert (a.sequence.request.request_id, a.start, a.first_new_page, len(a.new_pages)) == ("a", 8, 2, 1)
    assert isinstance(a, PlanRow), "it needs a page"
    assert b == DecodeRow(b.sequence, b.slot, 6) and isinstance(b, DecodeRow)
    assert a.token_ids == b.token_ids == (IN_FLIGHT,) and c.token_ids == [5, 6, 7]
    assert (plan.num_decodes, plan.num_rows, plan.num_tokens, plan.decode_only) == (2, 3, 5, False)
    assert plan.rows is plan.rows, "they are made once"


def test_rows_stay_those_of_the_plan_when_a_sequence_has_gone():
    scheduler = Scheduler(limits())
    decoding(scheduler, 3, 3)
    plan = scheduler.plan()
    slots = [sequence.slot for sequence in plan.decoding]
    scheduler.finish("a", FinishReason.ABORT)
    assert [(row.slot, row.start) for row in plan.rows] == [(slots[0], 3), (slots[1], 3)]


def test_a_plan_made_by_hand_says_the_same_of_its_rows():
    scheduler = Scheduler(limits())
    decoding(scheduler, 4, 3)
    plan = scheduler.plan()
    same = StepPlan.of(
        [PlanRow(r.sequence, r.slot, r.token_ids, r.start, True, r.first_new_page, r.new_pages) for r in plan.rows], 2
    )
    assert (same.num_decodes, same.num_tokens, same.decode_only) == (2, 2, True)
    assert [(r.slot, r.start, r.new_pages) for r in same.rows] == [(r.slot, r.start, r.new_pages) for r in plan.rows]


def test_the_tokens_of_a_step_are_events_in_the_order_of_its_rows():
    scheduler = Scheduler(limits())
    decoding(scheduler, 4, 3, max_tokens=2)
    scheduler.add(Request(request_id="c", prompt_token_ids=[5, 6, 7], sampling=SamplingParams(max_tokens=1)))
    tokens = scheduler.commit(plan := scheduler.plan(), [11, 12, 13])
    a, b, c = (row.sequence for row in plan.rows)
    assert list(tokens) == [
        TokenEvent(a, 11, FinishReason.LENGTH),
        TokenEvent(b, 12),
        TokenEvent(c, 13, FinishReason.LENGTH),
    ]
    assert len(tokens) == 3 and sorted(tokens.endings) == [0, 2]


def test_the_token_of_one_that_ended_meanwhile_is_no_event():
    scheduler = Scheduler(limits())
    decoding(scheduler, 4, 3)
    plan = scheduler.plan()
    scheduler.finish("a", FinishReason.ABORT)
    assert [(event.sequence.request.request_id, event.token_id) for event in scheduler.commit(plan, [11, 12])] == [
        ("b", 12)
    ]
